"""The launcher: starts a node's other virtual workers, each by running this program once more, as Lightning's ddp does.

A child runs the user's whole program, and so comes to each of its fits by itself: children are started once in a
program (in a Hydra sweep, once in each job), stay through all of its Trainers, and are waited for when it ends.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hetpipe.errors import SettingError, VirtualWorkerLost, say
from lightning_hetpipe.launch.children import Children, OnEnd
from lightning_hetpipe.launch.command import current_job, this_program
from lightning_hetpipe.launch.ends import (
    INTERRUPTED,
    TERMINATED,
    ToldToEnd,
    Uncaught,
    left_to_others,
    lost_workers,
    went_on_without,
)
from lightning_hetpipe.launch.parent_watch import this_child
from lightning_hetpipe.launch.ranks import Rank, Role, other_number
from lightning_hetpipe.lightning_private import BaseLauncher, TunerExit, is_fit, with_checkpoint
from lightning_hetpipe.server.protocol.identifiers import FirstLost, PeerFailed, Refusal, RemoteFault

T = TypeVar("T")

LEFT_OUT = 75
"""Exit code of a virtual worker that the others have gone on without, or have ended without if it is the first, and of
one that a person has started beside the first, which is lost: EX_TEMPFAIL of sysexits.h, "try again"."""


class WasLeftOut(SystemExit):
    """The others have gone on without this virtual worker, and are not to hear of its end."""


@dataclass
class _Launch:
    """Everything that this process has started for its program, or for one job of a sweep."""

    job: str | None
    processes: int
    children: Children
    closed: Callable[[], None] | None
    grace: float
    end_timeout: float | None = None
    failed: bool = False
    uncaught: Uncaught = field(default_factory=Uncaught)

    def fail(self, error: BaseException) -> None:
        """End the children, because the launch has failed. Their servers stay until `finish`, as we may use them."""
        self.failed = True
        if isinstance(error, ToldToEnd):  # as all were
            self.children.let_end()
        self._end_by(lambda: self.children.end(signal.SIGINT, self.grace))
        self.children.show_errors(error)

    def finish(self, failed: bool) -> None:
        """Wait for the children, and name once more those that were lost; end them if this process has failed."""
        went_on = not self.children.ended and not failed
        try:
            if not self.children.ended and failed:
                self._end_by(lambda: self.children.end(signal.SIGINT, self.grace))
            elif not self.children.ended:
                self._end_by(lambda: self.children.wait(self.end_timeout, self.grace))
                self.children.show_errors()
        finally:
            closed, self.closed = self.closed, None
            try:
                if closed is not None:
                    closed()  # while the children's interpreters are taken down
            finally:
                self.children.reap(self.grace)
        if went_on:
            lost_workers.name()

    def _end_by(self, end: Callable[[], None]) -> None:
        """Call ``end``; where it is interrupted, as by Ctrl-C, end the children quickly."""
        try:
            end()
        except BaseException:
            self.children.end(signal.SIGTERM, min(1.0, self.grace))
            raise


_launch: _Launch | None = None


def _own_launch() -> _Launch | None:
    """Return the launch that this process started, or None. A launch inherited through fork does not count."""
    return None if _launch is None or _launch.children.pid != os.getpid() else _launch


def _launch_of_job() -> _Launch | None:
    """The launch of the program, or of the job of a sweep, that runs now, if there is one."""
    launch = _own_launch()
    return None if launch is None or launch.job != current_job() else launch


def check_processes(rank: Rank) -> None:
    """Check that the launch, if there is one already, has as many processes as ``rank`` says.

    Raises:
        SettingError: if this process has started another number of virtual workers.
    """
    launch = _launch_of_job() if rank.role is Role.FIRST else None
    if launch is not None and launch.processes != rank.started:
        raise other_number(rank.started, launch.processes)


@dataclass(eq=False)
class Launcher(BaseLauncher):
    """Lets all virtual workers of this node run what the Trainer wants run.

    The first of them starts the others; those, and processes that torchrun or the like started, just run it.

    Args:
        rank: This process.
        extra: Called once, in the process that starts the others, while they start; returns the variables that they are
            given, such as the address of a server that it started.
        on_end: Called with the number on this node of a virtual worker whose process has ended, well or not, and its
            return code (negative: the signal's number), as soon as this process is in :meth:`launch`: in a thread of
            the launcher's, if it ends then.
        closed: Called once when the program ends, or the sweep's job, and all that were started here have ended.
        grace: Seconds until the next stronger signal goes to a child that is to end.
        end_timeout: Called at each launch; gives the seconds that the program's end waits for children; None: no limit.
        trainer: The Trainer whose run it is, once there is one.
        resumed_from: Called before a fit; gives the checkpoint that it resumes from, if this process comes back to a
            run that goes on; None else.
        restarts: Called once; gives how often each process that was started here is started again, at most.
    """

    rank: Rank
    extra: Callable[[], Mapping[str, str]]
    on_end: OnEnd | None = None
    closed: Callable[[], None] | None = None
    grace: float = 10.0
    end_timeout: Callable[[], float | None] = lambda: None
    trainer: L.Trainer | None = None
    resumed_from: Callable[[], Path | None] = lambda: None
    restarts: Callable[[], int] = lambda: 0

    @property
    def is_interactive_compatible(self) -> bool:
        """False: a notebook is no program that could be run once more."""
        return False

    def launch(self, function: Callable[..., T], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> T:
        """Call ``function``, once the other virtual workers of this node are started.

        An exception from it ends them: nothing is left behind.

        Raises:
            SettingError: if they have ended already, because an earlier call failed.
            WasLeftOut: if the others have gone on without this virtual worker.
        """
        self.trainer = trainer
        child, launch = this_child(), None
        lost_workers.watch()
        if child is not None:
            child.arrived()
        elif self.rank.role is Role.FIRST and self.rank.per_node > 1:
            end_timeout = self.end_timeout()
            launch = self._launched()
            launch.end_timeout = end_timeout
        try:
            if launch is not None:
                launch.children.watch(self.on_end)
            if is_fit(function, trainer) and (checkpoint := self.resumed_from()) is not None:
                args, kwargs = with_checkpoint(function, args, kwargs, checkpoint)
            return function(*args, **kwargs)
        except TunerExit:  # how lr_find ends a fit that went well
            raise
        except BaseException as error:
            lost_workers.forget(_code(error))
            if child is not None:
                child.given_up = True
            may_return = isinstance(error, VirtualWorkerLost) and error.may_return
            if isinstance(error, RemoteFault) and error.refusal in (Refusal.LEFT_OUT, Refusal.FENCED):
                may_return = True
            if may_return or isinstance(error, FirstLost):
                say(f"virtual worker {self.rank.index} ends, {self._why_again(error)}")
                if launch is not None:
                    launch.children.wake()  # they may be stopped as this process was, and are waited for
                raise WasLeftOut(LEFT_OUT) from error
            if child is not None and isinstance(error, (Exception, SIGTERMException)):
                child.failed(error)  # now, as cleaning up may take long, and be disturbed
            if launch is not None:
                launch.fail(error)
            if isinstance(error, VirtualWorkerLost):
                if child is not None and error.is_news:
                    say(str(error))
                if child is None and self.rank.index and error.how:
                    # Now, as this process may stay as long as the others need it.
                    say(went_on_without(f"virtual worker {self.rank.index}", error.how))
                raise error.with_traceback(None) from None  # no line of the program's is to blame
            if not isinstance(error, PeerFailed):
                raise
            if getattr(trainer, "received_sigterm", False) or SIGTERMException.__name__ in str(error):
                raise SIGTERMException(TERMINATED) from None  # this one, or another, was told to end, and so all end
            raise error.with_traceback(None) from None  # the place where this one waited explains nothing
        finally:
            if launch is not None:
                launch.children.watch(None)

    def _why_again(self, error: BaseException) -> str:
        """Say why this process ends, and is to be started again, as the end of a sentence."""
        if isinstance(error, FirstLost):
            return "as virtual worker 0 is lost; start both again, and it comes to the run that goes on"
        if self.rank.index:
            return f"as the others have gone on without it: {error}"
        return f"and the others do, as they have missed it: {error}; start the run again, from the newest checkpoint"

    def kill(self, signum: Any) -> None:
        """Pass on a signal that this process got: Lightning calls this for SIGTERM."""
        if (launch := _own_launch()) is not None:
            launch.children.kill(signum)

    def _launched(self) -> _Launch:
        """The launch of the program, or of the job of a sweep, that runs now; starts it if there is none."""
        global _launch
        check_processes(self.rank)
        processes = self.rank.started
        if (running := _launch_of_job()) is not None:
            if running.failed:
                raise SettingError(
                    f"virtual_workers={processes}, but the other virtual workers have ended, because an earlier fit,"
                    " validate, test or predict of this program failed; start the program anew"
                )
            return running
        if (before := _own_launch()) is not None:
            before.finish(False)  # the previous job of the sweep
        program = this_program()
        seats = self.rank.per_node
        children = Children(program.command, program.folder, processes, self.rank.index, self.restarts(), seats)
        try:
            children.give(self.extra())
        except BaseException as error:
            lost_workers.forget(_code(error))
            children.end(signal.SIGTERM, self.grace)
            if self.closed is not None:
                self.closed()
            children.reap(self.grace)
            raise
        # Last, so that it comes before what `extra` wants done at the end: children may need its server.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        _launch = _Launch(program.job, processes, children, self.closed, self.grace)
        return _launch


@dataclass(eq=False)
class ServingLauncher(BaseLauncher):
    """Has a process that is no virtual worker serve the others until these have ended; it ends with them.

    Args:
        serve: Serves; gives the exit code.
    """

    serve: Callable[[], int]

    @property
    def is_interactive_compatible(self) -> bool:
        """False, as of :class:`Launcher`."""
        return False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        """Serve, and end the program: what the Trainer wants run is the virtual workers'.

        SIGTERM is left to those, which are still to save what is here; a second one ends this process.

        Raises:
            SystemExit: always, unless serving fails.
        """
        try:
            with left_to_others():
                code = self.serve()
        except KeyboardInterrupt:
            say("this node was interrupted, and serves no more")
            code = INTERRUPTED
        raise SystemExit(code)

    def kill(self, signum: Any) -> None:
        """Nothing was started that a signal is to reach."""


def _code(error: BaseException) -> int:
    """The exit code of a program that ``error`` ends."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return TERMINATED if isinstance(error, SIGTERMException) else 1


def finish(failed: bool = False) -> Mapping[int, int]:
    """Wait for the children, as the end of the program does; the end of a sweep's job may.

    Args:
        failed: This process has failed in a way that the others do not know of: they are not waited for, but ended.

    Returns:
        Return codes of the virtual workers that have failed, by their number on this node.
    """
    if failed:
        lost_workers.forget()
    if (launch := _own_launch()) is None:
        return {}
    launch.finish(failed or launch.uncaught.error is not None)
    return dict(launch.children.failures)


def _at_exit() -> None:
    try:
        finish()
    except KeyboardInterrupt:  # a user who did not want to wait, and so has ended others
        lost_workers.exit_with_one()
