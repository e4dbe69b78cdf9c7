"""How errors reach the person at the terminal: a sentence for a wrong setting, a traceback for a bug."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from types import TracebackType

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_hetpipe.cli.composition import refusal
from lightning_hetpipe.cli.frames import frames, module

WRONG_SETTING = 2
FAILED = 1
INTERRUPTED = 130  # as a shell reports a program that SIGINT ended
TERMINATED = 143  # likewise, SIGTERM

_MACHINERY = ("hydra", "omegaconf", "lightning_hetpipe.cli")
_HINT = "(HYDRA_FULL_ERROR=1 shows where it was raised.)"


def report(error: BaseException, *, started: bool, arguments: Sequence[str]) -> int:
    """Prints the error to stderr, in one sentence if a setting is to blame; returns the exit code.

    Args:
        error: a `MisconfigurationException` if a setting was found to be to blame.
        started: whether the job had started. What is raised before comes of what the person wrote.
        arguments: the command line's.
    """
    if isinstance(error, MisconfigurationException):
        said = " ".join(str(error).split())
    elif not started:
        said = refusal(error, arguments)
    else:
        traceback.print_exception(type(error), error, _without_machinery(error.__traceback__))
        return FAILED
    print(f"hetpipe-train: {said}\n{_HINT}", file=sys.stderr)
    return WRONG_SETTING


def _without_machinery(tb: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is neither Hydra's nor this application's."""
    return next((frame for frame in frames(tb) if not module(frame).startswith(_MACHINERY)), tb)
