"""How errors reach the person at the terminal: a sentence for a wrong setting, a traceback for a bug."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning_hetpipe.cli.composition import refusal
from lightning_hetpipe.cli.console_script import TRAIN, ConsoleScript
from lightning_hetpipe.cli.tracebacks import without_machinery
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch import launcher
from lightning_hetpipe.launch.parent_watch import started as child_of_ours
from lightning_hetpipe.server.process.client import ServersSilent
from lightning_hetpipe.server.process.supervisor import ServerLost
from lightning_hetpipe.server.protocol.identifiers import PeerFailed
from lightning_hetpipe.server.transport.interface import CallRefused, Unreachable

WRONG_SETTING = 2
FAILED = 1
INTERRUPTED = 130  # as a shell reports a program that SIGINT ended
TERMINATED = 143  # likewise, SIGTERM

_FULL_ERROR = "HYDRA_FULL_ERROR"
_PASSED_ON = "HETPIPE_ERRORS_PASSED_ON"
"""Tells further virtual workers, which inherit the environment, that nobody has asked for the other one."""

_SAY_ALL = (ServersSilent, ServerLost, CallRefused, Unreachable)
"""Who waited for which servers, or what befell them: where this program was then explains nothing."""

_HINT = "(HYDRA_FULL_ERROR=1 shows where it was raised.)"


def wants_all() -> bool:
    """Whether a person has asked for tracebacks of wrong settings too."""
    return os.environ.get(_FULL_ERROR) == "1" and _PASSED_ON not in os.environ


@contextmanager
def errors_passed_on() -> Iterator[None]:
    """Make Hydra raise what went wrong, instead of printing it in its own way and exiting."""
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


def report(error: BaseException, *, started: bool, arguments: Sequence[str], program: ConsoleScript = TRAIN) -> int:
    """Say what the error is, in one sentence if a setting is at fault; return the exit code.

    It is printed to stderr; a further virtual worker leaves that to the first one, which prints once what several say.

    Args:
        error: a `SettingError` if a setting was found to be at fault.
        started: whether the job had started. What is raised before comes of what the person wrote.
        arguments: the command line's.
        program: which says so.
    """
    one_line, code = " ".join(str(error).split()), FAILED
    if isinstance(error, SettingError):
        said, code = f"{program.name}: {one_line}\n{_HINT}", WRONG_SETTING
    elif isinstance(error, PeerFailed):  # what has ended that one was printed when it was heard of
        said = f"{program.name}: {one_line}"
        code = WRONG_SETTING if WRONG_SETTING in launcher.finish(failed=True).values() else FAILED
    elif isinstance(error, _SAY_ALL):
        said = f"{program.name}: {one_line}"
    elif not started:
        said, code = f"{program.name}: {refusal(error, arguments, program)}\n{_HINT}", WRONG_SETTING
    else:
        said = "".join(traceback.format_exception(type(error), error, without_machinery(error.__traceback__))).rstrip()
    child = child_of_ours()
    if child is None or not child.failed(error, said):
        print(said, file=sys.stderr)
    return code


def ended_by(signal: str, code: int, program: ConsoleScript = TRAIN) -> int:
    """Say that a signal ended the run; return the exit code. Of a further virtual worker that is no news."""
    if child_of_ours() is None:
        print(f"\n{program.name}: {signal}.", file=sys.stderr)
    return code
