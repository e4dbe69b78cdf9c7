"""Choice of the weight policy, and of the correction of learning rates, by the optimizer: ``weights="auto"``.

Predicted weights bear larger learning rates than stashed ones where the optimizer averages gradients over many steps,
and smaller ones where it does not: on a quadratic of curvature h, with gradients one step stale, up to lr / (1 -
momentum) * h = 2.7 instead of 1 at momentum 0.9, equal limits at 0.5, and 0.62 instead of 1 without momentum
(*computed*). A prediction by the last step can fail without the correction, and was not seen to fail with it; it is
chosen for optimizers with which both were measured: ``docs/staleness.md`` has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import unwrap

from torch import Tensor
from torch.optim import SGD, Adam, Adamax, Muon, NAdam, Optimizer, RAdam, RMSprop, Rprop

from lightning_hetpipe.lightning_private import has_step_hooks
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
