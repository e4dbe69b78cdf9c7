"""Waits of virtual workers for each other that come at other minibatches on each: refused, or due at ends of waves.

If virtual workers have unequal shares, the intervals of virtual worker 0 count, in minibatches or steps. All cut after
one wave, in which virtual worker 0 reaches a multiple of the interval. If a virtual worker has come to its last
minibatch by then, all cut after their last minibatches.

Data on which nobody trains, because its virtual worker was lost in the middle of an epoch, is counted as missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.lightning_private import (
    asks_at_every_step,
    begun_minibatches,
    callbacks_of,
    change_saving_intervals,
    is_last_batch,
    on_monitor_candidates,
    saves_by_steps,
    seconds_between_validations,
    train_loaders,
)
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.rules.waves import common_waves, covered

if TYPE_CHECKING:
    from lightning_hetpipe.workers.group import Group
    from lightning_hetpipe.workers.shared_data import Shares
    from lightning_hetpipe.workers.synchroniser import Synchroniser


# Refusals.


def check_together(trainer: L.Trainer) -> None:
    """Refuse validations at intervals of time."""
    if (seconds := seconds_between_validations(trainer)) is not None:
        raise SettingError(
            f"val_check_interval is a time, {seconds:g} s, after which each virtual worker would be at another"
            " minibatch; give it as a number of batches, or as a part of an epoch"
        )


def check_returning(trainer: L.Trainer | None, index: int) -> None:
    """Refuse what other virtual workers did together before their first epoch, and ``index`` would do alone."""
    if callbacks_of(trainer, LearningRateFinder):
        raise SettingError(
            f"virtual worker {index} cannot come back to a fit with a LearningRateFinder, whose search all make"
            " together when it begins; leave restarts out, or find the rate in a program of its own"
        )


def minibatches_per_step(trainer: L.Trainer, epoch: int) -> int:
    """Return the minibatches of an optimizer step in ``epoch``, which a GradientAccumulationScheduler may change."""
    scheduler = _scheduler(trainer)
    return trainer.accumulate_grad_batches if scheduler is None else scheduler.get_accumulate_grad_batches(epoch)


def _scheduler(trainer: L.Trainer) -> GradientAccumulationScheduler | None:
    return next(iter(callbacks_of(trainer, GradientAccumulationScheduler)), None)


def check_shares(trainer: L.Trainer, shares: Shares) -> None:
    """Refuse waits at every step and counts over epochs if virtual workers have unequal ``shares``."""
    if not shares.adapts:
        first, last = trainer.current_epoch, trainer.max_epochs
        end = math.inf if last is None or last < 0 else last
        scheduler = _scheduler(trainer)
        changes = [] if scheduler is None else [epoch for epoch in scheduler.epochs if first < epoch < end]
        for epoch in (first, *changes):
            check_steps(shares, minibatches_per_step(trainer, epoch))
    if any(map(asks_at_every_step, callbacks_of(trainer, L.Callback))):
        raise SettingError(
            "max_time, Timer and ModelCheckpoint(train_time_interval=...) ask virtual worker 0 after every step, and"
            " with shares of their own virtual workers make different numbers of steps; leave them out, or set"
            " WSPCallback(shares='equal')"
        )
    if trainer.enable_validation and trainer.check_val_every_n_epoch is None:
        raise SettingError(
            "check_val_every_n_epoch=None counts batches over epochs, of which virtual workers with shares of their own"
            " have different numbers; leave it out, or set WSPCallback(shares='equal')"
        )
    if trainer.min_steps is not None:
        raise SettingError(
            f"min_steps={trainer.min_steps} counts each virtual worker's own steps, so that those with other shares"
            " would stop in other epochs; set min_epochs instead, or WSPCallback(shares='equal')"
        )
    by_step = any(scheduler.interval == "step" for scheduler in trainer.lr_scheduler_configs)
    if trainer.max_steps != -1 or by_step:
        rank_zero_warn(
            "max_steps and learning rate schedulers by step count each virtual worker's own steps, of which those with"
            " other shares make other numbers"
        )


def check_steps(shares: Shares | None, every: int) -> None:
    """Refuse waves that may hold no whole optimizer step of ``every`` minibatches while another wave holds one.
    ModelCheckpoint saves nothing if no step was made since its last save, and all virtual workers save together."""
    if shares is None or not shares.decided:
        return
    if any(length % every for length in shares.lengths):
        way = (
            "have a GradientAccumulationScheduler change it" if shares.adapts else f"set shares to multiples of {every}"
        )
        raise SettingError(
            f"shares={list(shares.lengths)} end waves within an optimizer step of accumulate_grad_batches={every}"
            f" minibatches; {way}"
        )


def check_batches(trainer: L.Trainer, group: Group) -> None:
    """Refuse settings that count batches if virtual workers have different numbers of batches. Called on all."""
    if trainer.is_global_zero and any(map(asks_at_every_step, callbacks_of(trainer, L.Callback))):
        rank_zero_warn(
            "max_time, Timer and ModelCheckpoint(train_time_interval=...) ask virtual worker 0 after every step, so"
            " that all go at its pace; leave them out where virtual workers are not equally fast"
        )
    told = (trainer.num_training_batches, trainer.val_check_batch if trainer.enable_validation else None)
    batches, checks = zip(*group.gather(told, "the start of training"), strict=True)
    if len(set(batches)) == 1:
        return
    counts = " and ".join(map(str, sorted(set(batches))))
    if trainer.enable_validation and checks != batches:
        if len(set(checks)) > 1:
            raise SettingError(
                f"val_check_interval={trainer.val_check_interval!r} comes after different numbers of batches, as"
                f" virtual workers have {counts} of them in an epoch; give it as a number of batches"
            )
        if trainer.check_val_every_n_epoch is None:
            raise SettingError(
                f"check_val_every_n_epoch=None counts batches over epochs, of which virtual workers have {counts}"
                " batches; leave it out, or give all the same number"
            )
    if trainer.max_epochs != 1 and any(map(saves_by_steps, callbacks_of(trainer, ModelCheckpoint))):
        raise SettingError(
            "ModelCheckpoint(every_n_train_steps=...) counts steps over epochs, of which virtual workers have"
            f" {counts} batches; set every_n_epochs, or give all the same number"
        )


# Intervals.


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


# Missed data.


class EpochShare(NamedTuple):
    """Share of virtual worker ``vw`` of an epoch. None is unknown, as with a user's batch sampler. ``batches`` are
    minibatches of ``batch_size`` samples each but the last one, ``samples`` all samples of the loader."""

    vw: int
    batches: int | None = None
    batch_size: int | None = None
    samples: int | None = None

    @classmethod
    def of(cls, trainer: L.Trainer) -> EpochShare:
        """Return the share of the virtual worker of ``trainer`` in the epoch that begins or continues."""
        vw, most, loaders = trainer.global_rank, trainer.num_training_batches, train_loaders(trainer)
        batches = None if most == math.inf else int(most)
        if batches is None or len(loaders) != 1 or not isinstance(loaders[0], DataLoader):
            return cls(vw, batches)
        sampler: Any = loaders[0].sampler
        try:
            return cls(vw, batches, loaders[0].batch_size, len(sampler))
        except TypeError:  # the sampler of an iterable dataset has no length
            return cls(vw, batches)

    def samples_of(self, minibatches: int) -> int | None:
        """Return the samples of the first ``minibatches``, or None if unknown."""
        if self.batch_size is None or self.samples is None:
            return None
        return min(minibatches * self.batch_size, self.samples)


class MissedData:
    """A count of the data on which lost virtual workers have not trained. A lost virtual worker has trained on its
    waves since the epoch's beginning, or since its last cut at which all came to one minibatch."""

    def __init__(self) -> None:
        self._shares: dict[int, EpochShare] = {}
        self._marks: list[tuple[int, int]] = []

    def begin(self, shares: Sequence[Sequence[Any]]) -> None:
        """Begin or continue an epoch with the ``shares`` of the virtual workers that are there. A virtual worker that
        was dealt data and is gone by now keeps its share of the epoch before."""
        self._shares |= {share[0]: EpochShare(*share) for share in shares}
        self._marks = []

    def mark(self, clock: int, minibatch: int) -> None:
        """Record that all present virtual workers are at ``clock``, after minibatch ``minibatch`` of the
        epoch on virtual worker 0."""
        self._marks.append((clock, minibatch))

    def report(self, vw: int, clock: int, lengths: Sequence[int], epoch: int) -> tuple[str, int]:
        """Return a sentence on the data that ``vw``, lost at ``clock``, missed in ``epoch``, and its samples, or 0.
        ``lengths`` are W_v of each virtual worker. The sentence is empty if nothing is missed."""
        share, first = self._shares.get(vw, EpochShare(vw)), self._marks[0][0]
        since, minibatch = next((mark for mark in reversed(self._marks) if mark[0] <= clock), self._marks[0])
        done = (minibatch * lengths[vw]) // lengths[0] + max(0, clock - since) * lengths[vw]
        waves = max(0, clock - first)
        lost = f"virtual worker {vw} was lost after {waves} wave{'s' * (waves != 1)} of epoch {epoch}"
        if share.batches is None:
            return f"{lost}: it has trained on {done} minibatches of its data, and nobody knows how many it missed", 0
        done = min(done, share.batches)
        if done == share.batches:
            return "", 0
        whole, trained = share.samples_of(share.batches), share.samples_of(done)
        if whole is None or trained is None:
            missed = share.batches - done
            return f"{lost}: {missed} of its {share.batches} minibatches of that epoch were not trained on", 0
        return f"{lost}: {whole - trained} of its {whole} samples of that epoch were not trained on", whole - trained
