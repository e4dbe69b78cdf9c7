"""Placement of layers (arXiv 1901.05803): ``allocation="placed"``.

Layers with many parameters and little work, such as a classifier's, lie where their server is, for every virtual
worker. So activations cross the network in place of parameters. Each node makes one virtual worker. All last stages
begin with the same layer and lie on one device, the *head*. With ``placement="local"`` their weights are on the server
of the head's node. An example of three nodes with two devices each, the head H on the last node:

    ABH, CDH, EH

If the head is the only device of its node, it either does nothing else, or is one more virtual worker with all layers.

The search chooses the head, whether it does something else, and its first layer. A rough estimate from the seconds of
devices and the bytes of the busiest links decides which choices are simulated first. The search ends when no other
choice may be faster. Of choices within 1% of the fastest, it takes the one with the fewest bytes on the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.allocation.allocator import HIDING, NEAR, Allocation, Allocator, GroupPlans, Kinds
from lightning_hetpipe.planning.allocation.groupings import PLACED, Group, Grouping
from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot
from lightning_hetpipe.planning.model.estimate import INSTANT, Estimate
from lightning_hetpipe.planning.model.profile import Profile, UserBytes
from lightning_hetpipe.planning.search.choice import slowest_stage

SIMULATED = 24
"""Largest number of choices that are simulated."""

PLANS = 60
"""Number of plans of several devices before the head, each at one Nm, after which the search ends."""

ROUGH = 1.25
"""Largest ratio of a simulated rate to the rough estimate, which supposes shorter waves and other shares."""

UNFIT = 5
"""Factor of these two limits while no choice fits."""


@dataclass(frozen=True)
class Head:
    """Device ``slot`` with the last stages of all virtual workers, from layer ``first`` on. It ends each group."""

    slot: DeviceSlot
    grouping: Grouping
    first: int


class PlacedPlans(GroupPlans):
    """Plans of groups whose last device has the layers from ``first`` on. Other devices divide the layers before."""

    def __init__(self, allocator: Allocator, first: int) -> None:
        stages = allocator.problem.stages
        problem = replace(allocator.problem, stages=None if stages is None else stages - 1)
        super().__init__(problem)
        self._first = first
        before = replace(
            problem.profile,
            layers=problem.profile.layers[:first],
            times={name: times[:first] for name, times in problem.profile.times.items()},
            calls=[(start, min(after, first)) for start, after in problem.profile.calls if start < first],
            user=UserBytes(),
        )
        self.before = GroupPlans(replace(problem, profile=before))
        """Plans of several devices before the last one."""

    def _found(self, slots: Group, in_flight: int | None, fewer: bool) -> Estimate:
        *own, _ = slots
        if in_flight is None:  # one more than without the head; two stages keep each other busy with three
            before = self.before.plan(own).in_flight if len(own) > 1 else 2 * len(own)
            in_flight, fewer = self._problem.versions(before + 1).most_in_flight, True
        found = self._at(slots, in_flight)
        while fewer and not found.fits and found.in_flight > 1:
            found = self._at(slots, found.in_flight - 1)
        return found

    def _at(self, slots: Group, in_flight: int) -> Estimate:
        *own, head = slots
        before = self.before.plan(own, in_flight) if len(own) > 1 else None
        stages = [(stage.slot, stage.first) for stage in before.stages] if before else [(slot, 0) for slot in own]
        stages.append((head, self._first if own else 0))
        found = self._problem.estimate([slot for slot, _ in stages], [first for _, first in stages], in_flight)
        return replace(found, idle=before.idle if before else (), reasons=(slowest_stage(found),))

    def _sorted(self, group: Sequence[DeviceSlot]) -> tuple[Kinds, Group]:
        *own, head = group
        kinds, slots = super()._sorted(own)
        beside = any(slot.node == head.node for slot in own)
        link = self._problem.cluster.nodes[head.node].own_link if beside else self._problem.cluster.between
        return (*kinds, (link, (head.device,))), (*slots, head)


def placed(allocator: Allocator, *, shares: bool, placement: str = "local", floor: float = 0.0) -> Allocation | None:
    """Return the fastest placed allocation, or None if all are slower than ``floor`` in minibatches per second.

    Of allocations within 1% of the fastest, take the one with the fewest bytes on the network. If none fits, take the
    one that lacks the least memory. Other arguments are as for
    :meth:`~lightning_hetpipe.planning.allocation.allocator.Allocator.allocate`.

    Raises:
        SettingError: if no two virtual workers would share a device.
    """
    rough = {head: _rough(allocator, head, shares, placement) for head in heads(allocator)}
    if not rough:
        count, layers = len(allocator.cluster.nodes), len(allocator.profile.layers)
        raise SettingError(
            f"allocation='{PLACED}' has the last of at least two stages of several virtual workers, one for each node,"
            f" on one device, and there {'is' if count == 1 else 'are'} {count} node{'' if count == 1 else 's'} and"
            f" {layers} layer{'' if layers == 1 else 's'}; use 'np' or 'auto', declare more nodes, or set fewer"
            " stages, of 2 or more"
        )
    best, found = floor, list[Allocation]()
    plans: dict[int, PlacedPlans] = {}
    for head in sorted(rough, key=lambda each: (-rough[each].rate, rough[each].nbytes)):
        effort = max(len(found) / SIMULATED, sum(len(each.before) for each in plans.values()) / PLANS)
        if ROUGH * rough[head].rate < NEAR * best or effort >= (1 if any(each.fits for each in found) else UNFIT):
            break
        own = plans.setdefault(head.first, PlacedPlans(allocator, head.first))
        found.append(allocator.allocate(PLACED, head.grouping, shares=shares, placement=placement, plans=own))
        best = max(best, found[-1].rate)
    if not any(each.fits for each in found):
        return min(found, key=lambda each: each.lacking, default=None)
    best = max(each.rate for each in found)
    return min((each for each in found if each.rate >= NEAR * best), key=lambda each: each.network_bytes)


def heads(allocator: Allocator) -> Iterator[Head]:
    """Yield all heads. Of equivalent heads yield the first."""
    cluster, stages = allocator.cluster, allocator.problem.stages
    seen = set()
    for slot in cluster.slots:
        node = cluster.nodes[slot.node]
        if (kind := (node.own_link, node.devices, slot.device)) in seen:
            continue
        seen.add(kind)
        for grouping in _groupings(cluster, slot):
            if stages is None or 2 <= stages <= min(map(len, grouping)):
                for first in range((stages or 2) - 1, len(allocator.profile.layers)):
                    yield Head(slot, grouping, first)


def _groupings(cluster: Cluster, head: DeviceSlot) -> Iterator[Grouping]:
    """Yield the groupings with this ``head``, the group of its own node last."""
    others = [own for node, own in enumerate(cluster.slots_by_node) if node != head.node]
    beside = [slot for slot in cluster.slots_by_node[head.node] if slot != head]
    groups = tuple((*own, head) for own in (*others, beside) if own)
    if len(groups) > 1:
        yield groups
    if groups and not beside:
        yield (*groups, (head,))


class _Rough(NamedTuple):
    """Minibatches per second, and the bytes on the network for each minibatch."""

    rate: float
    nbytes: float


def _rough(allocator: Allocator, head: Head, shares: bool, placement: str) -> _Rough:
    """Estimate the rate with ``head`` at the largest useful Nm, and the bytes."""
    profile, first, workers = allocator.profile, head.first, len(head.grouping)
    rates, busy = [], []
    for *own, last in head.grouping:
        rates.append(sum(1 / _seconds(profile, slot, 0, first) for slot in own) or 1 / _seconds(profile, last, 0))
        busy.append(_seconds(profile, last, first if own else 0))
    in_flight = allocator.in_flight or 2 * max(map(len, head.grouping)) + HIDING
    lengths = allocator.waves(rates, in_flight, shares)
    far = [length for group, length in zip(head.grouping, lengths, strict=True) if group[0].node != head.slot.node]
    received, output = sum(layer.given for layer in profile.layers[:first]), profile.layers[first - 1].output
    weights = sum(layer.parameters for layer in profile.layers[:first])
    pushed = (workers - 1) * weights if placement == "local" else 0  # to where the first virtual worker's are
    beside = lengths[0] * (output + received) if head.grouping[0][0].node != head.slot.node else 0
    link = max(sum(far) * (output + received), pushed + beside) / allocator.cluster.between.bandwidth
    computing = sum(lengths) / (sum(rates) if shares else workers * min(rates))
    together = sum(length * seconds for length, seconds in zip(lengths, busy, strict=True))
    nbytes = sum(far) * (2 * output + received) + 2 * pushed
    return _Rough(sum(lengths) / max(computing, together, link), nbytes / sum(lengths))


def _seconds(profile: Profile, slot: DeviceSlot, first: int, after: int | None = None) -> float:
    times = profile.times_on(slot.device)[first:after]
    return max(sum(each.forward + each.backward for each in times), INSTANT)
