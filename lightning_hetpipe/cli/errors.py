"""How errors reach the person at the terminal: a sentence for a wrong setting, a traceback for a bug."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_hetpipe.cli.composition import refusal
from lightning_hetpipe.cli.frames import frames, module
from lightning_hetpipe.cli.program import TRAIN, Program
from lightning_hetpipe.server.client import ServersSilent
from lightning_hetpipe.server.protocol import PeerFailed
from lightning_hetpipe.server.supervisor import ServerLost
from lightning_hetpipe.strategy import launcher
from lightning_hetpipe.strategy.lifeline import started as child_of_ours

WRONG_SETTING = 2
FAILED = 1
INTERRUPTED = 130  # as a shell reports a program that SIGINT ended
TERMINATED = 143  # likewise, SIGTERM

_FULL_ERROR = "HYDRA_FULL_ERROR"
_PASSED_ON = "HETPIPE_ERRORS_PASSED_ON"
"""Tells further virtual workers, which inherit the environment, that nobody has asked for the other one."""

_SAY_ALL = (ServersSilent, ServerLost)
"""Who waited for which servers, or what befell them: where this program was then explains nothing."""

_MACHINERY = ("hydra", "omegaconf", "lightning_hetpipe.cli")
_HINT = "(HYDRA_FULL_ERROR=1 shows where it was raised.)"


def wants_all() -> bool:
    """Whether a person has asked for tracebacks of wrong settings too."""
    return os.environ.get(_FULL_ERROR) == "1" and _PASSED_ON not in os.environ


@contextmanager
def errors_passed_on() -> Iterator[None]:
    """Under HYDRA_FULL_ERROR Hydra raises what went wrong, instead of printing it in its own way and exiting."""
    if wants_all():
        yield
        return
    ours = {_FULL_ERROR: "1", _PASSED_ON: "1"}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def report(error: BaseException, *, started: bool, arguments: Sequence[str], program: Program = TRAIN) -> int:
    """Says what the error is, in one sentence if a setting is to blame; returns the exit code.

    It is printed to stderr; a further virtual worker leaves that to the first one, which prints once what several say.

    Args:
        error: a `MisconfigurationException` if a setting was found to be to blame.
        started: whether the job had started. What is raised before comes of what the person wrote.
        arguments: the command line's.
        program: which says so.
    """
    code = WRONG_SETTING
    if isinstance(error, MisconfigurationException):
        said = f"{program.name}: {' '.join(str(error).split())}\n{_HINT}"
    elif isinstance(error, PeerFailed):  # what has ended that one was printed when it was heard of
        said = f"{program.name}: {' '.join(str(error).split())}"
        code = WRONG_SETTING if WRONG_SETTING in launcher.finish(failed=True).values() else FAILED
    elif isinstance(error, _SAY_ALL):
        said = f"{program.name}: {' '.join(str(error).split())}"
        code = FAILED
    elif not started:
        said = f"{program.name}: {refusal(error, arguments, program)}\n{_HINT}"
    else:
        said = "".join(traceback.format_exception(type(error), error, _without_machinery(error.__traceback__))).rstrip()
        code = FAILED
    child = child_of_ours()
    if child is None or not child.failed(error, said):
        print(said, file=sys.stderr)
    return code


def ended_by(signal: str, code: int, program: Program = TRAIN) -> int:
    """Says that a signal ended the run; returns the exit code. Of a further virtual worker that is no news."""
    if child_of_ours() is None:
        print(f"\n{program.name}: {signal}.", file=sys.stderr)
    return code


def _without_machinery(tb: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is neither Hydra's nor this application's."""
    return next((frame for frame in frames(tb) if not module(frame).startswith(_MACHINERY)), tb)
