"""Preemption: a run that is told to end saves where all virtual workers hold the same weights, and ends (law L6).

Virtual worker 0 decides, whichever virtual worker got the signal. It asks for a cut with the wave that runs, and all
cut at most D + 1 waves later (`extensions/waves_and_cuts.py`). The end of an epoch or of a validation serves as a cut
if it comes first. A single virtual worker saves after its step. If only one of several is told to end, it leaves after
a wave.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import lightning as L
from lightning.fabric.plugins.environments import SLURMEnvironment

from lightning_hetpipe.errors import say
from lightning_hetpipe.launch.ends import ToldToEnd
from lightning_hetpipe.launch.parent_watch import this_child
from lightning_hetpipe.lightning_private import ends_epoch, note_sigterm, on_requeue, on_sigterm, requeue_path
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.workers.synchroniser import NoSynchroniser, Synchroniser

TOGETHER = 2.0
"""Seconds in which SIGTERM reaches all processes of a run, from the scheduler and again from their launcher. A second
SIGTERM that comes later ends a process at once. A process that got SIGTERM alone leaves only after this time."""

LEAVES, NOTHING, END, REQUEUE = range(-1, 3)
"""Wishes, the strongest last: to leave alone, none, and from virtual worker 0: all end, SLURM requeues the job."""


class Preemption:
    """Handler that saves and ends a fit that is told to end.

    Args:
        trainer: Trainer whose signal handlers are not set yet.
        grace: Seconds from SIGTERM to SIGKILL.

    Attributes:
        agreed: What all do at the next step or epoch that begins with weights that all hold.
    """

    def __init__(self, trainer: L.Trainer, synchroniser: Synchroniser | NoSynchroniser, grace: float) -> None:
        self.agreed = NOTHING
        self._trainer = trainer
        self._grace = grace
        self._single = isinstance(synchroniser, NoSynchroniser)
        self._most_waves = 0 if isinstance(synchroniser, NoSynchroniser) else synchroniser.most_waves_to_cut
        self._pid = os.getpid()
        self._told: float | None = None  # when SIGTERM came
        self._wish = NOTHING
        self._hurries = False  # it leaves after its step
        self._requeue: tuple[Any, ...] = ()  # what the handler of SLURM's signal was given
        self._has_warned = False
        self._wave_ended: float | None = None
        self._wave_seconds = self._save_seconds = 0.0
        self._original = on_requeue(trainer, self._on_requeue)
        self._redirects = [
            self._original,
            on_sigterm(trainer, self._on_sigterm),
            Redirect(trainer.fit_loop.epoch_loop, "on_advance_end", self._on_step),
            Redirect(trainer.fit_loop, "on_advance_end", self._on_epoch),
            Redirect(trainer.strategy, "save_checkpoint", self._on_save),
        ]

    def close(self) -> None:
        for redirect in self._redirects:
            redirect.remove()

    # Signals, whose handlers run in Lightning's thread at any moment, also in a wait.

    def _on_sigterm(self, redirect: Redirect, *args: Any) -> None:
        """Note SIGTERM. Before training there is nothing to save, and without a launcher nobody to save with."""
        if os.getpid() != self._pid:  # a DataLoader worker, which ends with this process
            return
        child, now = this_child(), time.monotonic()
        if self._trainer.sanity_checking or (child is not None and child.orphaned):
            redirect.original(*args)
        elif self._told is None:
            self._told, self._wish = now, max(self._wish, END)
        elif now - self._told > TOGETHER and (self._single or self._trainer.is_global_zero):
            redirect.original(*args)
        elif now - self._told > TOGETHER:  # Lightning's exception would end the others as well
            self._hurries = True

    def _on_requeue(self, redirect: Redirect, *args: Any) -> None:
        self._requeue, self._wish = args, REQUEUE
        if self._told is None and self._trainer.is_global_zero:
            self._told = time.monotonic()

    @property
    def wish(self) -> int:
        """Wish of this virtual worker. Only virtual worker 0 has a wish for all."""
        if self._trainer.is_global_zero:
            return self._wish
        return LEAVES if self._told is not None and time.monotonic() - self._told >= TOGETHER else NOTHING

    def agree(self, wishes: Sequence[int]) -> None:
        """Take the ``wishes`` of all virtual workers at a cut. Called on all of them."""
        self.agreed = max(self.agreed, *wishes)

    def leave_unless_all_end(self) -> None:
        """Raise ToldToEnd after a wave or an epoch, unless virtual worker 0 was told to end as well."""
        if not self.agreed:
            self._end_now(alone=True)

    # Lightning's loops.

    def wave_ends(self) -> None:
        now = time.monotonic()
        if self._wave_ended is not None:
            self._wave_seconds = now - self._wave_ended
        self._wave_ended = now

    def _on_step(self, redirect: Redirect, *args: Any) -> None:
        redirect.original(*args)
        if self._told is None:
            return
        self._warn_if_late()
        if self._hurries:
            self._end_now(alone=True)
        if self._single and not ends_epoch(self._trainer):
            self.end()

    def _on_epoch(self, redirect: Redirect, *args: Any) -> None:
        """Save between two epochs, after the callbacks."""
        redirect.original(*args)
        if self.agreed or (self._single and self._told is not None):
            self.end()
        if self._told is not None and self._wish == END and self._trainer.fit_loop.done:  # too late for the last cut
            self._end_now(alone=not self._trainer.is_global_zero)

    def _on_save(self, redirect: Redirect, *args: Any, **kwargs: Any) -> None:
        started = time.monotonic()
        redirect.original(*args, **kwargs)
        self._save_seconds = time.monotonic() - started

    def _warn_if_late(self) -> None:
        """Warn once if saving needs more time than is left, as far as this fit has measured it."""
        if self._has_warned or self._told is None or not self._trainer.is_global_zero:
            return
        self._has_warned = True
        waves = self._most_waves * self._wave_seconds
        needed = time.monotonic() - self._told + waves + self._save_seconds
        if needed > self._grace:
            say(
                f"this run was told to end, and may need {needed:.0f} s until it is saved"
                f" ({waves:.0f} s until all hold the same weights, {self._save_seconds:.0f} s to write them), more than"
                f" the grace={self._grace:g} s that it has; if it is killed before, go on from its last checkpoint, and"
                " have it given more time, or shorter waves"
            )

    # The end.

    def end(self) -> NoReturn:
        """Save the run and raise ToldToEnd. Called on all virtual workers, at a cut or between two epochs."""
        trainer, first = self._trainer, self._trainer.is_global_zero
        requeues = (self._wish if self._single else self.agreed) == REQUEUE
        where, how = self._place(requeues)
        if where is not None:
            if requeues and first:
                self._original.original(*self._requeue)
            else:
                trainer.save_checkpoint(where)
            getattr(trainer.strategy.checkpoint_io, "teardown", int)()  # a plugin may still be writing
            trainer.strategy.barrier("the end of a run that is saved")
        if first:
            after = f"this run was told to end after {trainer.global_step} steps"
            say(f"{after}, and is saved in {where}; {how}" if where else f"{after}, and is not saved; {how}")
        self._end_now()

    def _end_now(self, alone: bool = False) -> NoReturn:
        note_sigterm(self._trainer)
        raise ToldToEnd(alone)

    def _place(self, requeues: bool) -> tuple[str | None, str]:
        """Return the file to save in, or None, and how to resume. SLURM's signal is an order to save. SIGTERM is no
        such order to a Trainer that writes no checkpoints."""
        trainer = self._trainer
        saver: Any = trainer.checkpoint_callback
        if saver is None and not requeues:
            return None, "its Trainer saves no checkpoints (enable_checkpointing=False), so start it anew"
        if requeues or SLURMEnvironment.detect():
            return requeue_path(trainer), "the same job of SLURM resumes from it by itself"
        path = unplanned_path(trainer, "preempted")
        return path, how_to_resume(path)


def unplanned_path(trainer: L.Trainer, why: str) -> str:
    """Return the file of a save that no callback planned for reason ``why``: beside a ModelCheckpoint's files."""
    folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
    return os.path.join(folder, f"{why}-epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt")


def how_to_resume(path: str) -> str:
    """Describe how to resume from ``path``, as the end of a sentence."""
    return f"to resume, start it again with trainer.fit(..., ckpt_path={path!r}), hetpipe-train with ckpt_path"
