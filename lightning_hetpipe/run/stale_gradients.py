"""Stale gradients: ``weights="auto"`` chooses weight policy and rate correction, and a fit begins with a warning.

If the optimizer averages gradients over many steps, predicted weights bear larger learning rates than stashed ones,
otherwise smaller rates. The limits of lr / (1 - momentum) * h were *computed* on a quadratic of curvature h, with
gradients one step stale. At momentum 0.9 they are 2.7 for predicted and 1 for stashed weights, at 0.5 equal, and
without momentum 0.62 and 1. Prediction by the last step can fail without the correction, and was not seen to fail with
it. It is chosen for optimizers with which both were measured (figures in ``docs/staleness.md``).
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
"""Lower learning rates at the beginning, an eighth or less at first. Adam and AdamW learn more slowly by them. The CNN
of ``docs/staleness.md`` with SGD 0.05, momentum 0.9 and Nm = 4 then classifies 98.3 to 99.7% of its test images
correctly after 8 epochs. With a quarter at first (tau) it reaches 94 to 98%, for any number of updates (*measured*)."""

AVERAGED = 0.5
"""Momentum, or first beta, above which prediction bears larger learning rates."""

MEASURED = (SGD, RMSprop, Adam, Adamax, NAdam, RAdam, Muon, Rprop)
"""Optimizers that were seen to learn no worse from predicted weights. Rprop learns nothing from stashed ones."""

DOWN = Context(prec=1, rounding=ROUND_DOWN)
"""Rounding of the rate in the warning: a user who sets that rate gets no further warning."""

HEAVY_BALL = (SGD, ASGD)

NORMALISED = (RMSprop, Adam, Adamax, NAdam, RAdam)
"""Optimizers that divide gradients by their size."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Automatic:
    """A choice for an optimizer. ``why`` gives messages the reason for the policy."""

    policy: WeightPolicy
    why: str
    lr_correction: Correction | None = None

    def planned(self, policy: WeightPolicy, why: str) -> Automatic:
        """Return the choice of a plan's ``policy`` for reason ``why``, or ``self`` if the policy is equal."""
        return self if policy is self.policy else Automatic(policy, why)

    def told(self, taken: WeightPolicy) -> str:
        """Describe the choice, its reason, and how to choose otherwise. ``taken`` differs if devices had no room."""
        why = self.why if taken is self.policy else f"devices have no room for what '{self.policy.name}' predicts"
        line = f"weights='auto' is '{taken.name}', as {why}"
        ways = [] if taken is STASH else ["weights='stash' to predict no weights"]
        if self.lr_correction is not None:
            line += f", with lower learning rates in the first {self.lr_correction.updates} updates"
            ways.append("lr_correction=None to lower no rates")
        return f"{line}; set {', '.join(ways)}" if ways else line


def automatic_policy(optimizer: Optimizer, *, clipped: bool) -> Automatic:
    """Choose for ``optimizer``, given whether gradients are ``clipped``."""
    name, most = type(optimizer).__name__, max(map(_averaged, optimizer.param_groups), default=0.0)
    if not has_step_hooks(optimizer):
        return Automatic(STASH, f"{name} takes no hooks, by which its steps could be predicted")
    if most <= AVERAGED and not isinstance(optimizer, Rprop):
        return Automatic(STASH, f"{name} with little momentum, or none, learns no better from predicted weights")
    own = str(unwrap(type(optimizer).step).__module__)  # within the hooks that torch puts around it
    if not isinstance(optimizer, MEASURED) or not own.startswith("torch.optim."):
        return Automatic(STASH, f"predictions were not measured with {name}; weights='pipeoptim' has one for any")
    policy = next(policy for policy in PREFERRED if lacks(policy, optimizer) is None)
    short = clipped and isinstance(optimizer, SGD)  # steps of SGD are as long as gradients are large
    corrected = None if short or policy == "xpipe" else CORRECTED
    return Automatic(POLICIES[policy], f"the optimizer is {name}", corrected)


def _averaged(group: dict[str, object]) -> float:
    """Return the momentum, or first beta, of a parameter group, or 0."""
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
    """Warn if the learning rate is larger than gradients this stale were seen to bear. Gradients may be ``minibatches``
    behind, and the updates of ``workers`` are added. Weights are ``predicted``, rates ``corrected`` at the beginning,
    and the weight policy was chosen by the optimizer (``automatic``)."""
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
    """Return True if the Trainer or a hook clips gradients."""
    return bool(trainer.gradient_clip_val) or is_overridden("configure_gradient_clipping", trainer.lightning_module)


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(part, BATCH_NORMS) for part in module.modules())


def stepped(optimizer: Optimizer) -> list[Stepped]:
    """Return the parameter groups of ``optimizer``, or none for an optimizer whose steps are of another kind."""
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
