"""Errors that a user can do something about: one sentence that names the setting, its value and the way out.

Notices are sentences for the person at the terminal, from any process of a launch.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
import traceback
import warnings
from collections.abc import Iterable

FIRST_UNTESTED = {"torch": (2, 16), "lightning": (2, 7)}
"""First minor versions of libraries that this release was not tested with: ``make compat`` tests those below."""

_COMPARED = 100
"""Letters of a wrong name that are compared with known names: the time grows with their number."""

NOTICE_AFTER = 15.0
"""Seconds after which a person is told of a wait for other processes."""


class _UserError(Exception):
    """Base of ``SettingError``, as Python adds further bases only to a class that has such a one."""


class SettingError(_UserError):
    """A setting, or a model, that this release cannot honour.

    Once Lightning is loaded it is a ``MisconfigurationException``, too (``strategy.registration``).

    Args:
        message: Names the setting and its value.
        way_out: What to change, as the end of the sentence. Empty if the message says it.
    """

    way_out = ""
    _joint = "; "

    def __init__(self, message: str = "", way_out: str = "") -> None:
        super().__init__(message)
        if way_out:
            self.way_out = way_out

    def __str__(self) -> str:
        return f"{super().__str__()}{self._joint}{self.way_out}" if self.way_out else super().__str__()


class PipelineRefusal(SettingError):
    """Refusal of what a pipeline cannot train, and a run without one can. Its ``way_out`` names settings that train it,
    once the run is known."""

    _joint = ", or "


class PipelineStalled(RuntimeError):
    """A wait inside the pipeline ran into its timeout. The message says who waited for whom."""


class VirtualWorkerLost(RuntimeError):
    """This virtual worker cannot go on, for no fault of the program's: it ends alone, as if it had been killed, and the
    others go on without it, unless it is virtual worker 0.

    Args:
        message: For a user of it alone.
        why: For those who go on, as the end of a sentence; empty where they know.
    """

    is_news = False
    """True where the others have long known that it is lost, so that nobody else tells the message."""

    may_return = False
    """True where it may be started again at once."""

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why

    @property
    def how(self) -> str:
        """State of this virtual worker since, as in "it was ..."; empty where others know."""
        return f"unable to go on, as {self.why}" if self.why else ""


class Discarded(BaseException):
    """Raised in the thread of a minibatch whose look-ahead is discarded, so that its ``training_step`` unwinds.

    A ``BaseException``, because a user's ``except Exception`` must not keep a discarded minibatch alive.
    """


def of_file(setting: str, error: SettingError, advice: str) -> SettingError:
    """Return ``error``, whose message begins with a file's path, for a user who gave that file as ``setting``.

    Args:
        setting: Its name.
        error: What is wrong with the file.
        advice: Way out, if the error has none.
    """
    return SettingError(f"{setting}={error.args[0]}", error.way_out or advice)


def reason_of(error: Exception) -> str:
    """Tell why something was not possible, by the error that it ended with.

    Only a ``SettingError`` is foreseen; its text is the reason.

    Raises:
        VirtualWorkerLost: if that is the error, as whatever was tried is not to blame.
    """
    if isinstance(error, VirtualWorkerLost):
        raise error from None
    if isinstance(error, SettingError):
        return str(error)
    text = " ".join(str(error).split())
    return (
        f"an unforeseen {type(error).__name__}{f' ({text})' if text else ''} occurred; please report it with the model"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known name closest to ``name``, or an empty string if none is close."""
    found = closest(name, known)
    return "" if found is None else f"; did you mean '{found}'?"


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like ``name``, or None if none is."""
    return next(iter(difflib.get_close_matches(name[:_COMPARED], list(known), n=1)), None)


def of_import(error: RuntimeError) -> RuntimeError | SettingError:
    """Return the error that a user is shown for ``error``, with which an import ended: torchvision's has no way out."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    if not any(frame.f_globals.get("__name__", "").partition(".")[0] == "torchvision" for frame in frames):
        return error
    return SettingError(
        "torchvision is of another build than torch, so that Lightning cannot be imported; install both from the same"
        " index (pip install --force-reinstall torch torchvision), or remove it (pip uninstall torchvision)"
    )


def warn_if_untested(library: str, version: str) -> None:
    """Warn of a ``version`` of ``library`` that this release was not tested with: private names may have changed."""
    first = FIRST_UNTESTED[library]
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) >= first:
        bound = ".".join(map(str, first))
        warnings.warn(
            f"lightning_hetpipe was not tested with {library} {version}, whose private names it uses;"
            f" if a run fails, pip install '{library}<{bound}'",
            stacklevel=2,
        )


def say(sentence: str) -> None:
    """Print a sentence for the person at the terminal."""
    with contextlib.suppress(OSError):
        print(f"hetpipe: {sentence}.", file=sys.stderr, flush=True)
