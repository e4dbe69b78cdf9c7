"""How errors reach the person at the terminal: a sentence for a wrong setting, a traceback for a bug."""

from __future__ import annotations

import re
import sys
import traceback
from types import TracebackType

from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException

from lightning_hetpipe.cli.settings import READ, unknown
from lightning_hetpipe.cli.targets import closest

WRONG_SETTING = 2
FAILED = 1
INTERRUPTED = 130  # as a shell reports a program that SIGINT ended

_MACHINERY = ("hydra", "omegaconf", "lightning_hetpipe.cli")
_HINT = "(HYDRA_FULL_ERROR=1 shows where it was raised.)"


def report(error: BaseException) -> int:
    """Prints the error to stderr, in one sentence if a setting is to blame; returns the exit code."""
    said = sentence(error)
    if said is not None:
        print(f"hetpipe-train: {said}\n{_HINT}", file=sys.stderr)
        return WRONG_SETTING
    traceback.print_exception(type(error), error, _without_machinery(error.__traceback__))
    return FAILED


def sentence(error: BaseException) -> str | None:
    """What to say about an error that the settings caused; None if it came out of the program, or the user's code."""
    if isinstance(error, MisconfigurationException):
        return _one_line(str(error))
    if isinstance(error, MissingConfigException):
        return _missing_config(error)
    if isinstance(error, OverrideParseException):
        # The ++ is what `overrides.settled` put there.
        return f"{error.override} cannot be read; write section.key=value ({_first_line(error)}).".replace("++", "")
    if isinstance(error, OmegaConfBaseException):
        key = re.search(r"full_key: (\S+)", str(error))
        return f"{key[1]}: {_first_line(error)}" if key else _first_line(error)
    if isinstance(error, HydraException):
        return _composition(error)
    if _module(_innermost(error.__traceback__)).startswith("hydra."):
        return _first_line(error)
    return None


def refused(error: InstantiationException, path: str) -> BaseException:
    """The exception behind a failed instantiation: as it was, or as a setting's where Lightning itself refused it."""
    cause: BaseException = error
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, TypeError | ValueError) and _module(_innermost(cause.__traceback__)).startswith("lightning."):
        refusal = MisconfigurationException(f"{path}: {_one_line(str(cause))}")
        refusal.__cause__ = cause
        return refusal
    return cause


def _missing_config(error: MissingConfigException) -> str:
    """`group=name` where the group has no such option."""
    if not error.missing_cfg_file or not error.options:
        return _first_line(error)
    group, _, name = error.missing_cfg_file.rpartition("/")
    near = closest(name, list(error.options))
    advice = f"did you mean {group}={near}?" if near else "choose one of them."
    return f"{group}={name} does not exist among {', '.join(error.options)}; {advice}"


def _composition(error: HydraException) -> str:
    """Hydra's own refusals. `modle=resnet` is the one that happens: a key without a section."""
    match = re.match(r"Could not (?:override|append to config|find match) [^']*'([\w@./]+)'", str(error))
    if match and "." not in match[1]:
        return str(unknown(match[1], "", [*READ, "experiment"]))
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _without_machinery(tb: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is neither Hydra's nor this application's."""
    start = tb
    while start is not None and _module(start).startswith(_MACHINERY):
        start = start.tb_next
    return start or tb


def _innermost(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb


def _module(tb: TracebackType | None) -> str:
    return str(tb.tb_frame.f_globals.get("__name__", "")) if tb is not None else ""
