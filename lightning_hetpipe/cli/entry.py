"""Start and end of a console script: runs its Hydra application, reports errors, and sets the exit code.

A wrong setting is one sentence and exit code 2; a bug its traceback and 1; a signal 128 plus its number.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_hetpipe.cli.attribution import attributed, frames, one_line
from lightning_hetpipe.cli.composition import refusal, settled
from lightning_hetpipe.cli.start_up import FAILED, INTERRUPTED, TERMINATED, WRONG_SETTING, ConsoleScript
from lightning_hetpipe.errors import SettingError, of_import
from lightning_hetpipe.launch.parent_watch import this_child
from lightning_hetpipe.server.process.server_process import ServerLost
from lightning_hetpipe.server.process.waits import ServersSilent
from lightning_hetpipe.server.protocol.identifiers import PeerFailed
from lightning_hetpipe.server.transport.interface import CallRefused, Unreachable

T = TypeVar("T")

_FULL_ERROR = "HYDRA_FULL_ERROR"
_SET_BY_US = "HETPIPE_ERRORS_PASSED_ON"
"""Tells further virtual workers, which inherit the environment, that no person has set HYDRA_FULL_ERROR."""

_HINT = f"({_FULL_ERROR}=1 shows where it was raised.)"
_MACHINERY = ("hydra", "omegaconf", "lightning_hetpipe.cli")


class _Terminated(BaseException):
    """SIGTERM has ended the job."""


class _JobFailed(BaseException):
    """Carrier of a job's error, its cause, out of Hydra, which would print something about an Exception."""


class SweepJobFailed(Exception):
    """End of a job of a sweep whose error was reported; Hydra takes this exception, and starts the next job."""


def enter(application: Callable[[], Any], program: ConsoleScript) -> None:
    """Run ``application``, a function that ``hydra.main`` decorates and whose body is in :func:`job`.

    It ends the process unless all goes well, with exit code 1 for a failure, with its traceback, and for a sweep with
    jobs that have failed; 2 for a wrong setting; 130 for Ctrl-C; 143 for SIGTERM.
    """
    this_child()  # from here on a child of our launcher ends with it
    sys.path.insert(0, os.getcwd())  # so that `_target_: my_model.MyModel` finds ./my_model.py
    sys.argv[1:] = settled(sys.argv[1:])
    # Lightning 2.6 on torch 2.13 warns so at every start, and nobody at this terminal could do anything about it.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
    asked_for_all = _wants_all()
    try:
        with _errors_passed_on():
            application()
    except KeyboardInterrupt:
        sys.exit(_ended_by("interrupted", INTERRUPTED, program))
    except _Terminated:
        sys.exit(_ended_by("terminated", TERMINATED, program))
    except SweepJobFailed:  # reported when it failed
        sys.exit(FAILED)
    except (_JobFailed, Exception) as caught:
        started = isinstance(caught, _JobFailed)
        error = caught.__cause__ or caught if started else caught
        if asked_for_all:
            raise error from error.__cause__
        sys.exit(report(error, program, started=started, arguments=sys.argv[1:]))


def job(run: Callable[[DictConfig], T], config: DictConfig, program: ConsoleScript) -> T:
    """Run one job of Hydra's; an error that a setting has caused leaves it as a ``SettingError`` that names it.

    In a sweep the error is reported at once, and the next job begins.
    """
    try:
        return run(config)
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning turns Ctrl-C into exit code 1
            raise KeyboardInterrupt from None
        if _known_code(end) == TERMINATED:
            raise _Terminated from end
        raise
    except Exception as error:
        found = attributed(error, config) or error
        if HydraConfig.get().mode != RunMode.MULTIRUN:
            raise _JobFailed from found
        if _wants_all():
            traceback.print_exception(found)
        else:
            report(found, program)
        raise SweepJobFailed from found


def report(error: BaseException, program: ConsoleScript, *, started: bool = True, arguments: Sequence[str] = ()) -> int:
    """Print ``error`` to stderr, as one sentence if a setting is at fault; return the exit code.

    A further virtual worker leaves printing to the first one, which prints once what several say.

    Args:
        error: A ``SettingError`` if a setting was found to be at fault.
        program: The one that ends.
        started: Whether the job had started. Earlier errors come of the command line and of configuration files.
        arguments: The command line's.
    """
    if isinstance(error, SettingError):
        text, code = f"{program.name}: {one_line(error)}\n{_HINT}", WRONG_SETTING
    elif (known := _known_code(error)) is not None:
        text, code = f"{program.name}: {one_line(error)}", known
    elif isinstance(error, RuntimeError) and (said := of_import(error)) is not error:
        text, code = f"{program.name}: {said}", FAILED
    elif not started:
        text, code = f"{program.name}: {refusal(error, arguments, program)}\n{_HINT}", WRONG_SETTING
    else:
        begin = (tb for tb, module in frames(error.__traceback__) if not module.startswith(_MACHINERY))
        shown = traceback.format_exception(type(error), error, next(begin, error.__traceback__))
        text, code = "".join(shown).rstrip(), FAILED
    child = this_child()
    if child is None or not child.failed(error, text):
        print(text, file=sys.stderr)
    return code


def _known_code(error: BaseException) -> int | None:
    """Exit code for a signal, and for what befell servers or another virtual worker; None for other errors."""
    lightnings = sys.modules.get("lightning.pytorch.utilities.exceptions")
    if lightnings is not None and isinstance(error, lightnings.SIGTERMException):
        return TERMINATED
    if isinstance(error, PeerFailed):  # its own error was printed when it was heard of
        from lightning_hetpipe.launch import launcher  # with Lightning

        return WRONG_SETTING if WRONG_SETTING in launcher.finish(failed=True).values() else FAILED
    return FAILED if isinstance(error, ServersSilent | ServerLost | CallRefused | Unreachable) else None


def _wants_all() -> bool:
    """Return whether a person has asked for tracebacks of wrong settings too."""
    return os.environ.get(_FULL_ERROR) == "1" and _SET_BY_US not in os.environ


@contextmanager
def _errors_passed_on() -> Iterator[None]:
    """Make Hydra raise errors instead of printing them in its own way and exiting."""
    if _wants_all():
        yield
        return
    ours = {_FULL_ERROR: "1", _SET_BY_US: "1"}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _ended_by(signal: str, code: int, program: ConsoleScript) -> int:
    """Print that a signal ended the run, unless this is a further virtual worker; return the exit code."""
    if this_child() is None:
        print(f"\n{program.name}: {signal}.", file=sys.stderr)
    return code
