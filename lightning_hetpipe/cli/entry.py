"""How a console script starts its Hydra application, and how it ends."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig

from lightning_hetpipe.cli.attribution import attributed
from lightning_hetpipe.cli.console_script import TRAIN, ConsoleScript
from lightning_hetpipe.cli.error_report import INTERRUPTED, TERMINATED, ended_by, errors_passed_on, report, wants_all
from lightning_hetpipe.cli.overrides import planned, settled

T = TypeVar("T")


class _JobFailed(BaseException):
    """Carrier of a job's error, its cause, out of Hydra, which would print something about an Exception."""


def enter(application: Callable[[], Any], program: ConsoleScript) -> None:
    """Run ``application``, a function that ``hydra.main`` decorates and whose body is in :func:`job`.

    It ends the process unless all goes well, with exit code 1 for a failure, with its traceback; 2 for a wrong setting;
    130 for Ctrl-C; 143 for SIGTERM.
    """
    sys.path.insert(0, os.getcwd())  # so that `_target_: my_model.MyModel` finds ./my_model.py
    sys.argv[1:] = settled(planned(sys.argv[1:]) if program is TRAIN else sys.argv[1:])
    # Lightning 2.6 on torch 2.13 warns so at every start, and nobody at this terminal could do anything about it.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
    asked_for_all = wants_all()
    try:
        with errors_passed_on():
            application()
    except KeyboardInterrupt:
        sys.exit(ended_by("interrupted", INTERRUPTED, program))
    except SIGTERMException:
        sys.exit(ended_by("terminated", TERMINATED, program))
    except (_JobFailed, Exception) as caught:
        started = isinstance(caught, _JobFailed)
        error = caught.__cause__ or caught if started else caught
        if asked_for_all:
            raise error from error.__cause__
        sys.exit(report(error, started=started, arguments=sys.argv[1:], program=program))


def job(run: Callable[[DictConfig], T], config: DictConfig) -> T:
    """Run one job of Hydra's; its errors are said in words of the configuration where that is at fault."""
    try:
        return run(config)
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning turns Ctrl-C into exit code 1
            raise KeyboardInterrupt from None
        raise
    except Exception as error:
        raise _JobFailed from attributed(error, config) or error
