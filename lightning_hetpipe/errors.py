"""Errors that a user can act on: one sentence that names the setting, its value and the way out.

Notices are sentences for the person at the terminal, from any process of a launch.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator

FIRST_UNTESTED = {"torch": (2, 16), "lightning": (2, 7)}
"""First minor versions of libraries with which this release was not tested. ``make compat`` tests earlier versions."""

_COMPARED = 100
"""Number of letters of a wrong name that are compared with known names, which bounds the time."""

NOTICE_AFTER = 15.0
"""Seconds of a wait for other processes after which the person at the terminal is told."""


class _UserError(Exception):
    """Base of ``SettingError``, because Python adds further bases only to a class that has a base of its own."""


class SettingError(_UserError):
    """A setting, or a model, that this release cannot honour.

    Once Lightning is loaded, it also is a ``MisconfigurationException`` (``strategy.registration``).

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
    """Refusal of a model that only a run without a pipeline can train. Its ``way_out`` follows when the run
    is known."""

    _joint = ", or "


class PipelineStalled(RuntimeError):
    """A wait inside the pipeline ran into its timeout. The message names who waited for whom."""


class VirtualWorkerLost(RuntimeError):
    """This virtual worker cannot go on, without a fault of the program, and ends alone as if it had been killed.

    The other virtual workers go on without it, unless it is virtual worker 0. ``message`` is for its user. ``why`` is
    for these other virtual workers, as the end of a sentence, or empty if they know the reason.
    """

    is_news = False
    """True if the other virtual workers have long known of the loss, so that only this process shows the message."""

    may_return = False
    """True if the virtual worker may be started again at once."""

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why

    @property
    def how(self) -> str:
        """State of this virtual worker, as in "it was ...". Empty if the others know."""
        return f"unable to go on, as {self.why}" if self.why else ""


class Discarded(BaseException):
    """Error in the thread of a minibatch whose look-ahead is discarded, so that its ``training_step`` unwinds.

    A ``BaseException``, because a user's ``except Exception`` must not keep a discarded minibatch alive.
    """


def of_file(setting: str, error: SettingError, advice: str) -> SettingError:
    """Return ``error``, whose message begins with a file's path, for a user who gave the file as ``setting``.

    ``advice`` is the way out if the error has none.
    """
    return SettingError(f"{setting}={error.args[0]}", error.way_out or advice)


def reason_of(error: Exception) -> str:
    """Return the reason why something was impossible. Only a ``SettingError`` is foreseen, and its text is the reason.

    Raises:
        VirtualWorkerLost: if that is the error, since it does not come from what was tried.
    """
    if isinstance(error, VirtualWorkerLost):
        raise error from None
    if isinstance(error, SettingError):
        return str(error)
    text = " ".join(str(error).split())
    return (
        f"an unforeseen {type(error).__name__}{f' ({text})' if text else ''} occurred; please report it with the model"
    )


def one_line(error: BaseException) -> str:
    """Return the text of ``error`` in one line, or the name of its class if it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of the text of ``error``, or the name of its class if it has no text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to ``name``, or an empty string."""
    found = closest(name, known)
    return "" if found is None else f"; did you mean '{found}'?"


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like ``name``, or None if no name is similar."""
    return next(iter(difflib.get_close_matches(name[:_COMPARED], list(known), n=1)), None)


def of_import(error: RuntimeError) -> RuntimeError | SettingError:
    """Return the error to show for ``error`` from an import. Torchvision's own error offers no way out."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    if not any(frame.f_globals.get("__name__", "").partition(".")[0] == "torchvision" for frame in frames):
        return error
    return SettingError(
        "torchvision is of another build than torch, so that Lightning cannot be imported; install both from the same"
        " index (pip install --force-reinstall torch torchvision), or remove it (pip uninstall torchvision)"
    )


def warn_if_untested(library: str, version: str) -> None:
    """Warn about an untested ``version`` of ``library``, whose private names may have changed."""
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


@contextlib.contextmanager
def notice_if_long(sentence: Callable[[], str]) -> Iterator[None]:
    """Context manager around a wait for other processes. If the wait takes long, print ``sentence()`` once. It starts a
    thread, which Python does not do at the program's exit."""
    timer = threading.Timer(NOTICE_AFTER, lambda: say(sentence()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
