"""The launcher: starts a node's other virtual workers, each by running this program once more, as Lightning's ddp does.

A child runs the user's whole program, and so meets every `fit` of it by itself: children are started once in a program
(in a Hydra sweep, once in each job), stay through all of its Trainers, and are waited for when it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.process import how
from lightning_hetpipe.server.protocol import PeerFailed
from lightning_hetpipe.strategy.children import Children, OnEnd, say
from lightning_hetpipe.strategy.lifeline import started
from lightning_hetpipe.strategy.private import BaseLauncher, TunerExit
from lightning_hetpipe.strategy.program import current_job, this_program
from lightning_hetpipe.strategy.ranks import Rank, Role, other_number
from lightning_hetpipe.strategy.uncaught import Uncaught

T = TypeVar("T")

_LAST = -1_000_000
"""Of multiprocessing's priorities, whose own are -100 to 10."""


@dataclass
class _Launch:
    """What this process has started."""

    job: str | None
    processes: int
    children: Children
    closed: Callable[[], None] | None
    grace: float
    failed: bool = False
    uncaught: Uncaught = field(default_factory=Uncaught)

    @property
    def is_ours(self) -> bool:
        """Whether this process is the one that started it, and no fork of that."""
        return self.children.pid == os.getpid()

    def fail(self, error: BaseException) -> None:
        """Ends the children, because the launch has failed. What they used stays until `finish`, as we may use it."""
        self.failed = True
        self._surely(lambda: self.children.end(signal.SIGINT, self.grace))
        self.children.show_errors(error)

    def finish(self, failed: bool) -> None:
        """Waits for the children, and says once more which of them had failed; ends them if this process has."""
        try:
            if not self.children.ended and failed:
                self._surely(lambda: self.children.end(signal.SIGINT, self.grace))
            elif not self.children.ended:
                self._surely(lambda: self.children.wait(self.grace))
                self.children.show_errors()
                self._say_who_failed()
        finally:
            closed, self.closed = self.closed, None
            if closed is not None:
                closed()

    def _surely(self, end: Callable[[], None]) -> None:
        try:
            end()
        except BaseException:  # somebody who does not want to wait
            self.children.end(signal.SIGTERM, min(1.0, self.grace))
            raise

    def _say_who_failed(self) -> None:
        failures = sorted(self.children.failures.items())
        if failures:
            named = ", ".join(f"virtual worker {worker}, which {how(code)}" for worker, code in failures)
            say(f"this run went on without {named}")


_launch: _Launch | None = None


def launcher_of(
    rank: Rank,
    extra: Callable[[], Mapping[str, str]],
    *,
    on_end: OnEnd | None = None,
    closed: Callable[[], None] | None = None,
    grace: float = 10.0,
) -> Launcher | None:
    """The launcher for a process of this rank, or None where there is only one virtual worker.

    Args:
        rank: This process.
        extra: Called once, in the process that starts the others, while they start; returns environment variables for
            them, such as the address of a server that it started.
        on_end: Called with the number on this node of a virtual worker whose process has ended, well or not, and its
            return code (negative: the signal's number), as soon as this process is in ``Launcher.launch``: in a thread
            of the launcher's, if it ends then.
        closed: Called once when the program ends, or the sweep's job, and all that were started here have ended.
        grace: Seconds until the next stronger signal goes to a child that is to end.

    Raises:
        SettingError: if this process has started another number of virtual workers.
    """
    if _launch is not None and _launch.is_ours and _launch.job == current_job() and rank.role is Role.FIRST:
        _check_number(rank.per_node, _launch)
    if rank.size == 1:
        return None
    return Launcher(rank, extra, on_end=on_end, closed=closed, grace=grace)


def _check_number(processes: int, launch: _Launch) -> None:
    if processes != launch.processes:
        raise other_number(processes, launch.processes)


class Launcher(BaseLauncher):
    """Lets all virtual workers of this node run what the Trainer wants run.

    The first of them starts the others; those, and processes that torchrun or the like started, just run it.
    """

    def __init__(
        self,
        rank: Rank,
        extra: Callable[[], Mapping[str, str]],
        *,
        on_end: OnEnd | None = None,
        closed: Callable[[], None] | None = None,
        grace: float = 10.0,
    ) -> None:
        self._rank = rank
        self._extra = extra
        self._on_end = on_end
        self._closed = closed
        self._grace = grace
        self.trainer: L.Trainer | None = None
        """Whose run it is, once there is one."""

    @property
    def is_interactive_compatible(self) -> bool:
        """No: a notebook is no program that could be run once more."""
        return False

    def launch(self, function: Callable[..., T], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> T:
        """Calls ``function``, once the other virtual workers of this node are started.

        What it raises ends them: nothing is left behind.

        Raises:
            SettingError: if they have ended already, because an earlier call failed.
        """
        self.trainer = trainer
        child, launch = started(), None
        if child is not None:
            child.arrived()
        elif self._rank.role is Role.FIRST and self._rank.per_node > 1:
            launch = self._launched()
        try:
            if launch is not None:
                launch.children.watch(self._on_end)
            return function(*args, **kwargs)
        except TunerExit:  # how lr_find ends a fit that went well
            raise
        except BaseException as error:
            if child is not None and isinstance(error, Exception):
                child.failed(error)  # now, as cleaning up may take long, and be disturbed
            if launch is not None:
                launch.fail(error)
            if isinstance(error, PeerFailed) and getattr(trainer, "received_sigterm", False):
                raise SIGTERMException from None  # another one has come as far as that first
            if isinstance(error, PeerFailed):
                raise error.with_traceback(None) from None  # where this one waited explains nothing
            raise
        finally:
            if launch is not None:
                launch.children.watch(None)

    def kill(self, signum: Any) -> None:
        """Passes on a signal that this process got: Lightning calls this for SIGTERM."""
        if _launch is not None and _launch.is_ours:
            _launch.children.kill(signum)

    def _launched(self) -> _Launch:
        """What this process has started for the program, or for the job of a sweep, that runs now."""
        global _launch
        job, processes = current_job(), self._rank.per_node
        if _launch is not None and _launch.is_ours and _launch.job == job:
            _check_number(processes, _launch)
            if _launch.failed:
                raise SettingError(
                    f"virtual_workers={processes}, but the other virtual workers have ended, because an earlier fit,"
                    " validate, test or predict of this program failed; start the program anew"
                )
            return _launch
        if _launch is not None and _launch.is_ours:
            _launch.finish(False)  # of the sweep's job before
        program = this_program()
        children = Children(program.command, program.folder, processes)
        try:
            children.give(self._extra())
        except BaseException:
            children.end(signal.SIGTERM, self._grace)
            if self._closed is not None:
                self._closed()
            raise
        # Last, so that it comes before what `extra` wants done at the end: children may need its server.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        _launch = _Launch(job, processes, children, self._closed, self._grace)
        return _launch


def finish(failed: bool = False) -> Mapping[int, int]:
    """Waits for what this process has started, as the end of the program does; the end of a sweep's job may.

    Args:
        failed: Something has gone wrong here that the others do not know of: they are not waited for, but ended.

    Returns:
        Return codes of the virtual workers that have failed, by their number on this node.
    """
    if _launch is None or not _launch.is_ours:
        return {}
    _launch.finish(failed or _launch.uncaught.error is not None)
    return dict(_launch.children.failures)


def _at_exit() -> None:
    """The program ends, and its exit code tells whether all virtual workers came to the end.

    Where something has failed in this process, too, it has an exit code for that: the program has been told.
    """
    if finish() and _launch is not None and not _launch.failed and _launch.uncaught.error is None:
        # Python has its exit code by now. What multiprocessing does at exit comes late, and its last is this.
        Finalize(None, _exit, args=(1,), exitpriority=_LAST)


def _exit(code: int) -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads it
            stream.flush()
    os._exit(code)
