"""Start and end of a console script: run its Hydra application, report errors, and set the exit code.

A wrong setting prints one sentence and exits with 2. A failure prints its traceback and exits with 1, as a sweep with
failed jobs does. Ctrl-C exits with 130, SIGTERM with 143.
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

from lightning_hetpipe.cli.attribution import attributed, frames
from lightning_hetpipe.cli.composition import refusal, settled
from lightning_hetpipe.cli.start_up import FAILED, WRONG_SETTING, ConsoleScript
from lightning_hetpipe.errors import SettingError, of_import, one_line
from lightning_hetpipe.launch.parent_watch import this_child
from lightning_hetpipe.server.process.server_process import ServerLost
from lightning_hetpipe.server.process.signals import INTERRUPTED, TERMINATED
from lightning_hetpipe.server.process.waits import ServersSilent
from lightning_hetpipe.server.protocol.identifiers import PeerFailed
from lightning_hetpipe.server.transport.interface import CallRefused, Unreachable

T = TypeVar("T")

_FULL_ERROR = "HYDRA_FULL_ERROR"
_SET_BY_US = "HETPIPE_ERRORS_PASSED_ON"
"""Variable beside HYDRA_FULL_ERROR, so that further virtual workers know that no person has set HYDRA_FULL_ERROR."""

_HINT = f"({_FULL_ERROR}=1 shows where it was raised.)"
_MACHINERY = ("hydra", "omegaconf", "lightning_hetpipe.cli")


class _Terminated(BaseException):
    """End of a job by SIGTERM."""


class _JobFailed(BaseException):
    """Carrier of a job's error (its cause) out of Hydra, which prints text of its own about an Exception."""


class SweepJobFailed(Exception):
    """End of a sweep's job whose error was reported. Hydra catches this exception and starts the next job."""


def enter(application: Callable[[], Any], program: ConsoleScript) -> None:
    """Run ``application``, which ``hydra.main`` decorates and whose body calls :func:`job`. Exit if it fails."""
    this_child()  # from here on, a child of our launcher ends with the launcher
    sys.path.insert(0, os.getcwd())  # so that `_target_: my_model.MyModel` finds ./my_model.py
    sys.argv[1:] = settled(sys.argv[1:])
    # Lightning 2.6 on torch 2.13 gives this warning at every start. Users can do nothing about it.
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
    """Run one job of Hydra's. If a setting has caused an error, raise a ``SettingError`` that names the setting.

    In a sweep, report the error at once, so that the next job begins.
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
    """Print ``error`` to stderr, as one sentence if it is a ``SettingError``, and return the exit code.

    A further virtual worker sends its text to the launcher, which prints equal texts once. If the job has not
    ``started``, the error comes from the command line ``arguments`` or from configuration files.
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
    """Return the exit code of SIGTERM, and of failures of servers or of another virtual worker, else None."""
    lightnings = sys.modules.get("lightning.pytorch.utilities.exceptions")
    if lightnings is not None and isinstance(error, lightnings.SIGTERMException):
        return TERMINATED
    if isinstance(error, PeerFailed):  # the other virtual worker's error is printed by now
        from lightning_hetpipe.launch import launcher  # with Lightning

        return WRONG_SETTING if WRONG_SETTING in launcher.finish(failed=True).values() else FAILED
    return FAILED if isinstance(error, ServersSilent | ServerLost | CallRefused | Unreachable) else None


def _wants_all() -> bool:
    """Return whether a person has asked for full tracebacks, even for wrong settings."""
    return os.environ.get(_FULL_ERROR) == "1" and _SET_BY_US not in os.environ


@contextmanager
def _errors_passed_on() -> Iterator[None]:
    """Context manager in which Hydra raises errors, instead of printing text of its own and exiting."""
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
    """Print which signal ended the run, unless this is a further virtual worker. Return ``code``."""
    if this_child() is None:
        print(f"\n{program.name}: {signal}.", file=sys.stderr)
    return code
