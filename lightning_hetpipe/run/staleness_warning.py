"""The warning of momentum with stale gradients, at the start of a fit."""

from __future__ import annotations

from decimal import ROUND_DOWN, Context

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hetpipe.rules.staleness import Momentum, bearable_rate, steps_behind

DOWN = Context(prec=1, rounding=ROUND_DOWN)
"""Rounding by which a user who does as the warning says has done enough."""

AVERAGING = (torch.optim.Muon,)
"""Optimizers whose ``momentum`` averages gradients, as Adam's first beta does, and so does not add to the rate."""


def check_staleness(
    trainer: L.Trainer,
    in_flight: int,
    minibatches: int,
    workers: int,
    *,
    predicted: bool = False,
    corrected: bool = False,
) -> None:
    """Warns where momentum makes the learning rate larger than gradients so stale are likely to bear.

    Args:
        trainer: Before its first step.
        in_flight: Nm.
        minibatches: By how many gradients may be behind.
        workers: Virtual workers whose updates are added.
        predicted: Whether weights are predicted.
        corrected: Whether learning rates are lower at the beginning.
    """
    steps = steps_behind(minibatches, trainer.accumulate_grad_batches)
    clipped = is_clipped(trainer)
    for group in momenta(trainer.optimizers[0]):
        most = bearable_rate(group, steps, workers, clipped=clipped, predicted=predicted, corrected=corrected)
        if most is not None:
            clip = "" if clipped or group.normalised else " clip gradients (gradient_clip_val=1),"
            other = " lr_correction," * (not corrected) if predicted else " weights='auto',"
            enough = f"{DOWN.create_decimal(most * (1 + 1e-9)):f}"
            rank_zero_warn(
                f"stale gradients and momentum={group.momentum:g} may keep this model from learning: with"
                f" {in_flight} in flight, gradients are up to {steps} steps old, and lr={group.lr:g} acts like"
                f" {group.lr * group.gain * workers:.3g}; lower lr to {enough} or less, or the momentum,{clip} set"
                f"{other} accumulate_grad_batches, or a smaller in_flight; docs/staleness.md has the rule, and how to"
                " silence this warning"
            )
            return


def is_clipped(trainer: L.Trainer) -> bool:
    """Return True if gradients are clipped, by the Trainer or by a hook."""
    return bool(trainer.gradient_clip_val) or is_overridden("configure_gradient_clipping", trainer.lightning_module)


def momenta(optimizer: torch.optim.Optimizer) -> list[Momentum]:
    """Heavy-ball momentum of each parameter group of ``optimizer``; none is 0."""
    if isinstance(optimizer, AVERAGING):
        return []
    return [
        Momentum(
            max((float(group[name]) for name in ("lr", "initial_lr", "max_lr") if name in group), default=0.0),
            float(group.get("momentum") or 0.0),
            float(group.get("dampening") or 0.0),
            normalised=isinstance(optimizer, torch.optim.RMSprop),
        )
        for group in optimizer.param_groups
    ]
