"""Intervals in minibatches or steps if virtual workers have unequal shares: the intervals of virtual worker 0 count.

All cut after the same wave, in which virtual worker 0 reaches a multiple of the interval. If a virtual worker has come
to its last minibatch by then, all cut after their last minibatches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hetpipe.lightning_private import (
    begun_minibatches,
    callbacks_of,
    change_saving_intervals,
    is_last_batch,
    on_monitor_candidates,
)
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.rules.waves import common_waves, covered
from lightning_hetpipe.run.together import check_steps
from lightning_hetpipe.workers.synchroniser import Synchroniser


class Epoch(NamedTuple):
    """An epoch, or the rest of an epoch, on one virtual worker.

    Attributes:
        first: Minibatches of the epoch before it was resumed.
        last: Minibatches of the epoch, up to ``max_steps``.
        steps: Optimizer steps before the epoch.
        every: Minibatches of an optimizer step.
        checks: Minibatches between two validations, or None.
    """

    first: int
    last: int
    steps: int
    every: int
    checks: int | None

    def steps_after(self, minibatch: int) -> int:
        """Return the optimizer steps after ``minibatch`` of the epoch. The last minibatch always steps."""
        rest = int(minibatch == self.last and minibatch % self.every > 0)
        return self.steps + minibatch // self.every - self.first // self.every + rest


class Interval(int):
    """An interval of virtual worker 0. As a number, it gives the remainder 0 when it is due."""

    is_due: Callable[[int], bool]

    @staticmethod
    def of(number: int, is_due: Callable[[int], bool]) -> Interval:
        interval = Interval(number)
        interval.is_due = is_due
        return interval

    def __rmod__(self, count: int) -> int:
        return 0 if self.is_due(int(self)) else 1

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


class Intervals:
    """Validations and ``ModelCheckpoint(every_n_train_steps=...)`` at ends of waves, on all virtual workers alike."""

    def __init__(self, trainer: L.Trainer, synchroniser: Synchroniser) -> None:
        self._trainer = trainer
        self._synchroniser = synchroniser
        self._epochs: dict[int, Epoch] = {}  # of virtual workers that are there
        change_saving_intervals(trainer, lambda interval: Interval.of(interval, self._saves))
        self._checks: int | None = None
        self._redirects = [
            on_monitor_candidates(callback, self._name) for callback in callbacks_of(trainer, ModelCheckpoint)
        ]

    def close(self) -> None:
        change_saving_intervals(self._trainer, int)
        for redirect in self._redirects:
            redirect.remove()
        if isinstance(self._trainer.val_check_batch, Interval):
            self._trainer.val_check_batch = self._checks

    def begin(self) -> None:
        """Agree on an epoch, whose loop is about to begin. Called on all."""
        trainer = self._trainer
        _, first = begun_minibatches(trainer)
        if not isinstance(trainer.val_check_batch, Interval):
            self._checks = None if trainer.val_check_batch is None else int(trainer.val_check_batch)
        steps, every, last = trainer.global_step, trainer.accumulate_grad_batches, int(trainer.num_training_batches)
        if trainer.max_steps >= 0:
            last = min(last, (first // every + trainer.max_steps - steps) * every)
        check_steps(self._synchroniser.shares, every)
        # Shares may have become smaller than the interval, which Lightning has compared with the first epoch's.
        checks = None if self._checks is None else min(self._checks, int(trainer.num_training_batches))
        told = Epoch(first, last, steps, every, checks)
        group = self._synchroniser.group
        found = group.gather((group.index, *told), "the start of an epoch")
        self._epochs = {index: Epoch(*each) for index, *each in found}
        if (checks := self._epochs[0].checks) is not None:
            trainer.val_check_batch = Interval.of(checks, self._validates)

    def wave(self, minibatch: int) -> int | None:
        """Return the number of waves that ``minibatch`` of the epoch completes, or None if it ends no wave."""
        own = self._epochs.get(self._synchroniser.group.index)
        if own is None:
            return 0
        waves, open_ = divmod(minibatch - own.first, self._synchroniser.wave)
        return None if open_ else waves

    def is_last(self) -> bool:
        """Return True if the minibatch that has begun is the last of the epoch here."""
        own = self._epochs.get(self._synchroniser.group.index)
        return is_last_batch(self._trainer) or (own is not None and begun_minibatches(self._trainer)[1] >= own.last)

    def ends_wave(self) -> bool:
        """Return True if the minibatch that has begun is the last of a wave or of the epoch."""
        return self.is_last() or self.wave(begun_minibatches(self._trainer)[1]) is not None

    def _validates(self, interval: int) -> bool:
        found = self._covered()
        return found is not None and found.stop // interval > found.start // interval

    def _saves(self, interval: int) -> bool:
        found = self._covered()
        if found is None:
            return False
        steps = self._epochs[0].steps_after
        return steps(found.stop) // interval > steps(found.start) // interval

    def _covered(self) -> range | None:
        """Return the minibatches of virtual worker 0 in the wave that has just ended here, or None."""
        if not self.ends_wave():
            return None
        wave = None if self.is_last() else self.wave(begun_minibatches(self._trainer)[1])
        lengths, (first, last, *_) = self._synchroniser.lengths, self._epochs[0]
        there = self._epochs
        common = common_waves([lengths[index] for index in there], [epoch[:2] for epoch in there.values()])
        return covered(wave, common, lengths[0], first, last)

    def _name(self, redirect: Redirect, *args: Any, **kwargs: Any) -> Any:
        """Return the candidates for a checkpoint's name with virtual worker 0's steps, so that all use one name."""
        candidates = redirect.original(*args, **kwargs)
        candidates["step"] = self._trainer.strategy.broadcast(candidates["step"])
        return candidates
