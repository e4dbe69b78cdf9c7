"""The launcher: starts a node's other virtual workers, each by running this program once more, as Lightning's ddp does.

A child runs the user's whole program, and so meets every `fit` of it by itself: children are started once in a program
(in a Hydra sweep, once in each job), stay through all of its Trainers, and are waited for when it ends.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch.children import Children, OnEnd
from lightning_hetpipe.launch.command import current_job, this_program
from lightning_hetpipe.launch.lost_workers import losses
from lightning_hetpipe.launch.parent_watch import started
from lightning_hetpipe.launch.ranks import Rank, Role, other_number
from lightning_hetpipe.launch.uncaught import Uncaught
from lightning_hetpipe.lightning_private import BaseLauncher, TunerExit
from lightning_hetpipe.server.protocol.identifiers import PeerFailed

T = TypeVar("T")

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a program that SIGTERM has ended, as shells report it."""


@dataclass
class _Launch:
    """What this process has started."""

    job: str | None
    processes: int
    children: Children
    closed: Callable[[], None] | None
    grace: float
    patience: float | None = None
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
        """Waits for the children, and says once more which of them were lost; ends them if this process has failed."""
        went_on = not self.children.ended and not failed
        try:
            if not self.children.ended and failed:
                self._surely(lambda: self.children.end(signal.SIGINT, self.grace))
            elif not self.children.ended:
                self._surely(lambda: self.children.wait(self.patience, self.grace))
                self.children.show_errors()
        finally:
            closed, self.closed = self.closed, None
            try:
                if closed is not None:
                    closed()  # while the children's interpreters are taken down
            finally:
                self.children.reap(self.grace)
        if went_on:
            losses.name()

    def _surely(self, end: Callable[[], None]) -> None:
        try:
            end()
        except BaseException:  # somebody who does not want to wait
            self.children.end(signal.SIGTERM, min(1.0, self.grace))
            raise


_launch: _Launch | None = None


def launcher_of(
    rank: Rank,
    extra: Callable[[], Mapping[str, str]],
    *,
    on_end: OnEnd | None = None,
    closed: Callable[[], None] | None = None,
    grace: float = 10.0,
    patience: Callable[[], float | None] = lambda: None,
) -> Launcher | None:
    """The launcher for a process of this rank, or None where there is only one virtual worker.

    Args:
        rank: This process.
        extra: Called once, in the process that starts the others, while they start; returns what they are to be told,
            such as the address of a server that it started.
        on_end: Called with the number on this node of a virtual worker whose process has ended, well or not, and its
            return code (negative: the signal's number), as soon as this process is in ``Launcher.launch``: in a thread
            of the launcher's, if it ends then.
        closed: Called once when the program ends, or the sweep's job, and all that were started here have ended.
        grace: Seconds until the next stronger signal goes to a child that is to end.
        patience: Asked at each launch for how many seconds the program's end waits for children; None: as they live.

    Raises:
        SettingError: if this process has started another number of virtual workers.
    """
    if _launch is not None and _launch.is_ours and _launch.job == current_job() and rank.role is Role.FIRST:
        _check_number(rank.per_node, _launch)
    if rank.size == 1:
        return None
    return Launcher(rank, extra, on_end=on_end, closed=closed, grace=grace, patience=patience)


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
        patience: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._rank = rank
        self._extra = extra
        self._on_end = on_end
        self._closed = closed
        self._grace = grace
        self._patience = patience
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
        losses.watch()
        if child is not None:
            child.arrived()
        elif self._rank.role is Role.FIRST and self._rank.per_node > 1:
            patience = self._patience()
            launch = self._launched()
            launch.patience = patience
        try:
            if launch is not None:
                launch.children.watch(self._on_end)
            return function(*args, **kwargs)
        except TunerExit:  # how lr_find ends a fit that went well
            raise
        except BaseException as error:
            losses.forget()
            if child is not None:
                child.given_up = True
            if child is not None and isinstance(error, (Exception, SIGTERMException)):
                child.failed(error)  # now, as cleaning up may take long, and be disturbed
            if launch is not None:
                launch.fail(error)
            if isinstance(error, PeerFailed) and (
                getattr(trainer, "received_sigterm", False) or SIGTERMException.__name__ in str(error)
            ):
                raise SIGTERMException(TERMINATED) from None  # this one, or another, was told to end, and so all end
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
        children = Children(program.command, program.folder, processes, self._rank.index)
        try:
            children.give(self._extra())
        except BaseException:
            children.end(signal.SIGTERM, self._grace)
            if self._closed is not None:
                self._closed()
            children.reap(self._grace)
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
    if failed:
        losses.forget()
    if _launch is None or not _launch.is_ours:
        return {}
    _launch.finish(failed or _launch.uncaught.error is not None)
    return dict(_launch.children.failures)


def _at_exit() -> None:
    try:
        finish()
    except KeyboardInterrupt:  # who did not want to wait, and so has ended others
        losses.exit_with_one()
