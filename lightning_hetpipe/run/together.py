"""Refusals of what virtual workers cannot do together, because it comes at another minibatch for each of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.lightning_private import (
    asks_at_every_step,
    callbacks_of,
    saves_by_steps,
    seconds_between_validations,
)

if TYPE_CHECKING:
    from lightning_hetpipe.workers.group import Group
    from lightning_hetpipe.workers.shared_data import Shares


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
