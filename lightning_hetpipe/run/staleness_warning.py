"""The warning of learning rates that are too large for stale gradients, at the start of a fit."""

from __future__ import annotations

from decimal import ROUND_DOWN, Context

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_hetpipe.rules.staleness import Stepped, bearable_rate, steps_behind
from lightning_hetpipe.run.automatic import automatic_policy

DOWN = Context(prec=1, rounding=ROUND_DOWN)
"""Rounding by which a user who does as the warning says has done enough."""

HEAVY_BALL = (torch.optim.SGD, torch.optim.ASGD)

NORMALISED = (torch.optim.RMSprop, torch.optim.Adam, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam)
"""Optimizers that divide gradients by their size."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_staleness(
    trainer: L.Trainer,
    in_flight: int,
    minibatches: int,
    workers: int,
    *,
    predicted: bool = False,
    corrected: bool = False,
    automatic: bool = False,
) -> None:
    """Warn if the learning rate is larger than gradients so stale were seen to bear.

    Gradients may be ``minibatches`` behind, and the updates of ``workers`` are added. Weights are ``predicted``, rates
    ``corrected`` at the beginning, and the weight policy was chosen by the optimizer (``automatic``).
    """
    optimizer, steps = trainer.optimizers[0], steps_behind(minibatches, trainer.accumulate_grad_batches)
    clipped, batch_norm = is_clipped(trainer), has_batch_norm(trainer.lightning_module)
    for group in stepped(optimizer):
        most = bearable_rate(
            group, steps, workers, clipped=clipped, predicted=predicted, corrected=corrected, batch_norm=batch_norm
        )
        if most is None:
            continue
        acts = group.lr * group.gain * workers
        momentum = f" with momentum={group.momentum:g}" if group.momentum else ""
        large = f"acts like {acts:.3g}" if acts != group.lr else f"of {type(optimizer).__name__} is large for that"
        ways = [f"lr to {DOWN.create_decimal(most * (1 + 1e-9)):f} or less"]
        if steps > 1:
            local = minibatches == in_flight - 1  # and no other virtual worker's updates are missing
            ways.insert(
                0, f"accumulate_grad_batches={minibatches} for one step" if local else "accumulate_grad_batches"
            )
            if in_flight > 1:
                ways.append("a smaller in_flight")
        if predicted and not group.normalised and not clipped:
            ways.append("gradient_clip_val=1")
            if not corrected:
                ways.append("lr_correction")
        if not predicted and not automatic and automatic_policy(optimizer, clipped=clipped).policy.predicts:
            ways.append("weights='auto'")
        rank_zero_warn(
            f"stale gradients may keep this model from learning: with {in_flight} in flight they are up to"
            f" {steps} step{'' if steps == 1 else 's'} old, and lr={group.lr:g}{momentum} {large}; set"
            f" {', or '.join(ways)}; docs/staleness.md has the rule, and how to silence this warning"
        )
        return


def is_clipped(trainer: L.Trainer) -> bool:
    """Return True if gradients are clipped, by the Trainer or by a hook."""
    return bool(trainer.gradient_clip_val) or is_overridden("configure_gradient_clipping", trainer.lightning_module)


def has_batch_norm(module: nn.Module) -> bool:
    """Return True if any part of ``module`` is a BatchNorm."""
    return any(isinstance(part, BATCH_NORMS) for part in module.modules())


def stepped(optimizer: torch.optim.Optimizer) -> list[Stepped]:
    """Parameter groups of ``optimizer``; none of an optimizer whose steps are of another kind."""
    normalised = isinstance(optimizer, NORMALISED)
    if not normalised and not isinstance(optimizer, HEAVY_BALL):
        return []
    return [
        Stepped(
            max((float(group[name]) for name in ("lr", "initial_lr", "max_lr") if name in group), default=0.0),
            float(group.get("momentum") or 0.0),
            float(group.get("dampening") or 0.0),
            normalised=normalised,
        )
        for group in optimizer.param_groups
    ]
