"""Launcher: starts a node's other virtual workers, each by running this program again, as Lightning's ddp does.

A child runs the user's whole program, and so reaches each of its fits by itself. A program (in a Hydra sweep, each job)
starts its children once, and keeps them through all of its Trainers. It waits for them at its end.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hetpipe.errors import SettingError, VirtualWorkerLost, say
from lightning_hetpipe.launch.children import Children, OnEnd
from lightning_hetpipe.launch.command import current_job, this_program
from lightning_hetpipe.launch.ends import left_to_others, lost_workers, went_on_without
from lightning_hetpipe.launch.parent_watch import this_child
from lightning_hetpipe.launch.ranks import Rank, Role, other_number
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.lightning_private import BaseLauncher, TunerExit, with_checkpoint
from lightning_hetpipe.server.process.signals import INTERRUPTED, TERMINATED
from lightning_hetpipe.server.protocol.identifiers import FirstLost, PeerFailed, Refusal, RemoteFault

T = TypeVar("T")

LEFT_OUT = 75
"""Exit code of a virtual worker that was lost to the run, but may be started again: EX_TEMPFAIL of sysexits.h. The
other virtual workers have gone on without it, or have ended without it if it is the first. Or a person has started it
beside the first virtual worker, which is lost."""


class WasLeftOut(SystemExit):
    """Exit of a virtual worker that was left out. The other virtual workers go on, and must not hear of its end."""


_launch: Children | None = None


def _own_launch() -> Children | None:
    """Return the children that this process has started for its program, or for one job of a sweep, or None. A launch
    inherited through fork does not count."""
    return None if _launch is None or _launch.pid != os.getpid() else _launch


def _launch_of_job() -> Children | None:
    """Return the launch of the running program, or of the running job of a sweep, or None."""
    launch = _own_launch()
    return None if launch is None or launch.job != current_job() else launch


def check_processes(rank: Rank) -> None:
    """Check that an existing launch has as many processes as ``rank`` says. Raise SettingError if this process has
    started another number of virtual workers."""
    launch = _launch_of_job() if rank.role is Role.FIRST else None
    if launch is not None and launch.processes != rank.started:
        raise other_number(rank.started, launch.processes)


@dataclass(eq=False)
class Launcher(BaseLauncher):
    """Launcher by which all virtual workers of this node run the Trainer's function.

    The node's first virtual worker starts the other virtual workers. These, and processes of an external launcher, just
    run it. A process that is no virtual worker serves the virtual workers instead, until they have ended.

    Args:
        extra: Called once while the first process starts the other processes. It returns variables for them, such as a
            server's address.
        settings: Called at each launch in the process that starts others. It returns the settings, of which those about
            restarts and about the wait at the program's end are used.
        serve: Called in a process that is no virtual worker. It serves, and returns the exit code.
        on_end: Called when a virtual worker's process has ended, well or not, with its number among all and its
            return code (negative: a signal). Calls begin within :meth:`launch`, and later ones come from a thread of
            the launcher.
        closed: Called once at the end of the program or of the sweep's job, after the ends of all processes.
        resumed_from: Called before a fit. If this process comes back to a running run, it returns the checkpoint to
            resume from, else None.
    """

    rank: Rank
    extra: Callable[[], Mapping[str, str]]
    settings: Callable[[], WSPSettings]
    serve: Callable[[], int]
    on_end: OnEnd | None = None
    closed: Callable[[], None] | None = None
    resumed_from: Callable[[], Path | None] = lambda: None
    trainer: L.Trainer | None = None

    @property
    def is_interactive_compatible(self) -> bool:
        """False, because a notebook is no program that could run again."""
        return False

    def launch(self, function: Callable[..., T], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> T:
        """Start the other virtual workers of this node, and call ``function``. An exception of it ends them all. Raise
        SettingError if they have already ended, because an earlier call failed. Raise WasLeftOut if they have gone on
        without this virtual worker. In a process that is no virtual worker, serve, and end the program by SystemExit.
        """
        self.trainer = trainer
        if self.rank.role is Role.HOST:
            raise SystemExit(self._served())
        child, launch = this_child(), None
        lost_workers.watch()
        if child is not None:
            child.arrived()
        elif self.rank.role is Role.FIRST and self.rank.per_node > 1:
            settings = self.settings()
            launch = self._launched(settings.restarts)
            launch.end_timeout = settings.end_timeout
        try:
            if launch is not None:
                launch.watch(self.on_end)
            fits = trainer is not None and trainer.state.fn == TrainerFn.FITTING
            if fits and (checkpoint := self.resumed_from()) is not None:
                args, kwargs = with_checkpoint(function, args, kwargs, checkpoint)
            return function(*args, **kwargs)
        except TunerExit:  # lr_find ends a successful fit by this
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
                    launch.wake()  # they may be stopped as this process was, which waits for them
                raise WasLeftOut(LEFT_OUT) from error
            if child is not None and isinstance(error, (Exception, SIGTERMException)):
                child.failed(error)  # now, because cleaning up may take long, and be disturbed
            if launch is not None:
                launch.fail(error)
            if isinstance(error, VirtualWorkerLost):
                if child is not None and error.is_news:
                    say(str(error))
                if child is None and self.rank.index and error.how:
                    # Now, because this process may stay as long as the others need it.
                    say(went_on_without(f"virtual worker {self.rank.index}", error.how))
                raise error.with_traceback(None) from None  # no line of the program's is to blame
            if not isinstance(error, PeerFailed):
                raise
            if getattr(trainer, "received_sigterm", False) or SIGTERMException.__name__ in str(error):
                raise SIGTERMException(TERMINATED) from None  # some process was told to end, so all end
            raise error.with_traceback(None) from None  # the place where this one waited explains nothing
        finally:
            if launch is not None:
                launch.watch(None)

    def _why_again(self, error: BaseException) -> str:
        """Return the end of a sentence that says why this process ends and has to be started again."""
        if isinstance(error, FirstLost):
            return "as virtual worker 0 is lost; start both again, and it comes to the run that goes on"
        if self.rank.index:
            return f"as the others have gone on without it: {error}"
        return f"and the others do, as they have missed it: {error}; start the run again, from the newest checkpoint"

    def kill(self, signum: Any) -> None:
        """Pass on a signal that this process got. Lightning calls this for SIGTERM."""
        if (launch := _own_launch()) is not None:
            launch.kill(signum)

    def _served(self) -> int:
        """Serve, and return the exit code. The first SIGTERM is left to the virtual workers, which must still save the
        weights here. A second SIGTERM ends this process."""
        try:
            with left_to_others():
                return self.serve()
        except KeyboardInterrupt:
            say("this node was interrupted, and serves no more")
            return INTERRUPTED

    def _launched(self, restarts: int) -> Children:
        """Return the launch of the running program or job of a sweep. Start it if there is none."""
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
        children = Children(this_program(), self.rank, restarts, self.closed)
        try:
            children.give(self.extra())
        except BaseException as error:
            lost_workers.forget(_code(error))
            children.finish(True, signal.SIGTERM)
            raise
        # Registered last, so that it runs before the end of a server from `extra`, which children may need.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        _launch = children
        return children


def _code(error: BaseException) -> int:
    """Return the exit code of a program that ``error`` ends."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return TERMINATED if isinstance(error, SIGTERMException) else 1


def finish(failed: bool = False) -> Mapping[int, int]:
    """Wait for the children, as the end of the program does. A sweep's job may call it at its end. With ``failed``,
    this process has failed in a way unknown to the children, which are ended at once. Return the return codes of failed
    virtual workers, by their number on this node."""
    if failed:
        lost_workers.forget()
    if (launch := _own_launch()) is None:
        return {}
    launch.finish(failed)
    return dict(launch.failures)


def _at_exit() -> None:
    try:
        finish()
    except KeyboardInterrupt:  # a user did not want to wait, which has ended other processes
        lost_workers.exit_with_one()
