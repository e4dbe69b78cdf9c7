"""Weight policies side by side: what a plan for each of them would bring on the same devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_hetpipe.planning.model.units import digits, in_bytes
from lightning_hetpipe.planning.plan.table import aligned
from lightning_hetpipe.planning.search.choice import Choice
from lightning_hetpipe.rules.versions import POLICIES, Versions, WeightPolicy

_HEADER = ["weights", "in flight", "minibatches per second", "memory of all stages", "steps stale"]


def compared_policies(chosen: Sequence[WeightPolicy]) -> list[WeightPolicy]:
    """Policies that suit an optimizer, in the order of the docs: those ``chosen`` for it, and those that suit any."""
    return [each for each in POLICIES.values() if each in chosen or not each.predicts or each.keeps_change]


def side_by_side(
    policies: Sequence[WeightPolicy], plan: Callable[[WeightPolicy], Choice], in_flight: int | None, every: int
) -> list[str]:
    """Lay out a row for each of ``policies``, as its ``plan`` has it.

    Args:
        policies: In the order of the rows.
        plan: Makes a plan for a policy.
        in_flight: Nm, where it is not chosen by the plan.
        every: Minibatches of an optimizer step.
    """
    rows = []
    for policy in policies:
        if in_flight is None or Versions(policy, in_flight, every).is_possible:
            rows.append(_row(policy, plan(policy)))
        else:
            needs = f"needs trainer.accumulate_grad_batches={policy.least_window(in_flight)}"
            rows.append([policy.name, "", "", "", needs])
    return aligned([_HEADER, *rows], left=(0, len(_HEADER) - 1))


def _row(policy: WeightPolicy, choice: Choice) -> list[str]:
    steps = choice.versions.most_steps
    return [
        policy.name,
        str(choice.in_flight),
        digits(choice.rate) if choice.fits else "does not fit",
        in_bytes(sum(stage.memory.total for stage in choice.stages)),
        f"{steps}, predicted" if policy.predicts and steps else str(steps),
    ]
