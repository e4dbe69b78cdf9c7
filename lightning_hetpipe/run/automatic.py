"""Choice of the weight policy, and of the correction of learning rates, by the optimizer: ``weights="auto"``.

Predicted weights bear larger learning rates than stashed ones where the optimizer averages gradients over many steps,
and smaller ones where it does not: on a quadratic of curvature h, with gradients one step stale, up to lr / (1 -
momentum) * h = 2.7 instead of 1 at momentum 0.9, equal limits at 0.5, and 0.62 instead of 1 without momentum
(*computed*). The figures in ``docs/staleness.md`` agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.lightning_private import has_step_hooks
from lightning_hetpipe.rules.versions import POLICIES, STASH, WeightPolicy
from lightning_hetpipe.run.lr_correction import Correction
from lightning_hetpipe.run.prediction import PREFERRED, prediction_of

CORRECTED = Correction(updates=100, least=8)
"""Lower learning rates at the beginning, an eighth or less at first. The CNN of ``docs/staleness.md`` with SGD 0.05,
momentum 0.9 and Nm = 4 then gets 98.3 to 99.7% of its test images right after 8 epochs; with a quarter at first (tau),
94 to 98%, for whatever number of updates (*measured*). At lower rates, and with Adam, it makes no difference."""

AVERAGED = 0.5
"""Momentum, or first beta, above which prediction bears larger learning rates."""

_BY_NAME = {
    "sgd_momentum": "spectrain",
    "adam": "xpipe",
    "adamw": "xpipe",
    "amsgrad": "xpipe",
    **dict.fromkeys(("adamax", "muon", "nadam", "radam", "rmsprop_momentum"), "pipeoptim"),
}


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

    def told(self, taken: WeightPolicy) -> str:
        """Say what was chosen, and why; ``taken`` is another policy where there was no room for it."""
        why = self.why if taken is self.policy else f"devices have no room for what '{self.policy.name}' predicts"
        line = f"weights='auto' is '{taken.name}', as {why}"
        if self.lr_correction is not None:
            line += f", with lower learning rates in the first {self.lr_correction.updates} updates (lr_correction)"
        return line if taken is STASH else f"{line}; set weights='stash' for weights that are not predicted"


def automatic_policy(optimizer: Optimizer, *, clipped: bool) -> Automatic:
    """Choose for ``optimizer``; ``clipped`` says whether gradients are clipped, which is as good as lower rates."""
    name, most = type(optimizer).__name__, max(map(_averaged, optimizer.param_groups), default=0.0)
    if not has_step_hooks(optimizer):
        return Automatic(STASH, f"{name} takes no hooks, by which its steps could be predicted")
    if most <= AVERAGED:
        return Automatic(STASH, f"{name} with little momentum, or none, learns no better from predicted weights")
    policy = next(policy for policy in PREFERRED if _has_rule(policy, optimizer))
    return Automatic(POLICIES[policy], f"the optimizer is {name}", None if clipped else CORRECTED)


def planned_policies(optimizer: str | float) -> list[WeightPolicy]:
    """Policies for an optimizer by its name in the memory model, of which the first is taken that fits."""
    policy = POLICIES[_BY_NAME.get(optimizer, STASH.name)] if isinstance(optimizer, str) else STASH
    return [*dict.fromkeys([policy, STASH])]


def _has_rule(policy: str, optimizer: Optimizer) -> bool:
    try:
        prediction_of(policy, optimizer)
    except SettingError:
        return False
    return True


def _averaged(group: dict[str, object]) -> float:
    """The momentum, or first beta, of a parameter group; 0 where there is none."""
    betas = group.get("betas")
    first = betas[0] if isinstance(betas, tuple | list) and betas else group.get("momentum")
    return float(first) if isinstance(first, int | float) else 0.0
