"""Stale gradients that an optimizer bears: the choice that suits it, and a warning at the start of a fit.

``weights="auto"`` chooses the weight policy, and the correction of learning rates.

Predicted weights bear larger learning rates than stashed ones where the optimizer averages gradients over many steps,
and smaller ones where it does not: on a quadratic of curvature h, with gradients one step stale, up to lr / (1 -
momentum) * h = 2.7 instead of 1 at momentum 0.9, equal limits at 0.5, and 0.62 instead of 1 without momentum
(*computed*). A prediction by the last step can fail without the correction, and was not seen to fail with it; it is
chosen for optimizers with which both were measured: ``docs/staleness.md`` has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_DOWN, Context
from inspect import unwrap

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adam, Adamax, Muon, NAdam, Optimizer, RAdam, RMSprop, Rprop

from lightning_hetpipe.lightning_private import has_step_hooks
from lightning_hetpipe.rules.staleness import Stepped, bearable_rate, steps_behind
from lightning_hetpipe.rules.versions import POLICIES, STASH, WeightPolicy
from lightning_hetpipe.run.around_step import Correction
from lightning_hetpipe.run.prediction import PREFERRED, lacks

CORRECTED = Correction(updates=100, least=8)
"""Lower learning rates at the beginning, an eighth or less at first. The CNN of ``docs/staleness.md`` with SGD 0.05,
momentum 0.9 and Nm = 4 then gets 98.3 to 99.7% of its test images right after 8 epochs; with a quarter at first (tau),
94 to 98%, for whatever number of updates (*measured*). Adam and AdamW need none: at usual rates they learn more slowly
with lower ones at first."""

AVERAGED = 0.5
"""Momentum, or first beta, above which prediction bears larger learning rates."""

MEASURED = (SGD, RMSprop, Adam, Adamax, NAdam, RAdam, Muon, Rprop)
"""Optimizers that were seen to learn no worse from predicted weights; Rprop learns nothing from stashed ones."""


DOWN = Context(prec=1, rounding=ROUND_DOWN)
"""Rounding by which a user who does as the warning says has done enough."""

HEAVY_BALL = (SGD, ASGD)

NORMALISED = (RMSprop, Adam, Adamax, NAdam, RAdam)
"""Optimizers that divide gradients by their size."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Automatic:
    """A choice for an optimizer.

    Attributes:
        policy: The weight policy.
        why: The reason for it, for people.
        lr_correction: Lower learning rates at the beginning; None for none.
    """

    policy: WeightPolicy
    why: str
    lr_correction: Correction | None = None

    def planned(self, policy: WeightPolicy, why: str) -> Automatic:
        """Take the ``policy`` of a plan, and ``why``, where another one was chosen."""
        return self if policy is self.policy else Automatic(policy, why)

    def told(self, taken: WeightPolicy) -> str:
        """Say what was chosen, why, and how to choose otherwise; ``taken`` is another where there was no room."""
        why = self.why if taken is self.policy else f"devices have no room for what '{self.policy.name}' predicts"
        line = f"weights='auto' is '{taken.name}', as {why}"
        ways = [] if taken is STASH else ["weights='stash' to predict no weights"]
        if self.lr_correction is not None:
            line += f", with lower learning rates in the first {self.lr_correction.updates} updates"
            ways.append("lr_correction=None to lower no rates")
        return f"{line}; set {', '.join(ways)}" if ways else line


def automatic_policy(optimizer: Optimizer, *, clipped: bool) -> Automatic:
    """Choose for ``optimizer``; ``clipped`` says whether gradients are clipped."""
    name, most = type(optimizer).__name__, max(map(_averaged, optimizer.param_groups), default=0.0)
    if not has_step_hooks(optimizer):
        return Automatic(STASH, f"{name} takes no hooks, by which its steps could be predicted")
    if most <= AVERAGED and not isinstance(optimizer, Rprop):
        return Automatic(STASH, f"{name} with little momentum, or none, learns no better from predicted weights")
    if not isinstance(optimizer, MEASURED) or not _steps_as_torch(optimizer):
        return Automatic(STASH, f"predictions were not measured with {name}; weights='pipeoptim' has one for any")
    policy = next(policy for policy in PREFERRED if lacks(policy, optimizer) is None)
    short = clipped and isinstance(optimizer, SGD)  # whose steps are as long as gradients are large
    corrected = None if short or policy == "xpipe" else CORRECTED
    return Automatic(POLICIES[policy], f"the optimizer is {name}", corrected)


def _steps_as_torch(optimizer: Optimizer) -> bool:
    """Return True if the step of ``optimizer`` is torch's own, within the hooks that torch has put around it."""
    return str(unwrap(type(optimizer).step).__module__).startswith("torch.optim.")


def _averaged(group: dict[str, object]) -> float:
    """The momentum, or first beta, of a parameter group; 0 where there is none."""
    betas = group.get("betas")
    first = betas[0] if isinstance(betas, Sequence) and betas else group.get("momentum")
    return float(first) if isinstance(first, int | float | Tensor) else 0.0


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


def stepped(optimizer: Optimizer) -> list[Stepped]:
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
