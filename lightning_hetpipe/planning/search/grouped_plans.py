"""Plans whose stages may lie on groups of devices, if these beat the best plan without groups.

Two parts of a node's devices are joined at a time while that helps, or all parts of a node if no pair helps. Each way
to join is planned as if each group were one device. A group has the times of divided layers
(:mod:`~lightning_hetpipe.planning.model.divided_stage`), and the memory of its largest device, which holds the unsplit
weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, islice, pairwise, permutations, product

from lightning_hetpipe.planning.model.cluster import Cluster, Device, DeviceSlot, Node
from lightning_hetpipe.planning.model.divided_stage import DividedStage, group_times
from lightning_hetpipe.planning.model.estimate import Estimate, StageEstimate
from lightning_hetpipe.planning.model.profile import LayerWidths, Profile, layers_of_runs
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.problem import PlanningProblem

WORTH = 1.03
"""Smallest ratio of rates at which groups are worth their trouble."""

RETRIES = 3
"""Number of attempts in which members that lack memory get less work. Without retries, a plan for two equal devices of
which one holds a part of the weights is 6% slower (``test_a_member_has_no_more_than_its_memory``)."""

MOST_WAYS = 64
"""Number of plans that are compared if a stage begins within a run: all plans of three stages, of which two do."""

Parts = tuple[tuple[DeviceSlot, ...], ...]
"""Devices of each group. Most groups have one device."""


def plan_with_groups(problem: PlanningProblem, in_flight: int | None = None) -> Estimate:
    """Return the best plan with groups if they make it :data:`WORTH` times as fast, else the best plan without groups.

    The ``widths`` of the problem's profile define which layers can be divided. Without ``in_flight``, Nm is chosen.

    Raises:
        SettingError: as :func:`~lightning_hetpipe.planning.search.choice.best_plan` does.
    """
    best = best_plan(problem, in_flight)
    if not problem.profile.widths or len(problem.slots) == 1 or problem.ordered:
        return best
    problem, above = replace(problem, spread=False), best.rate * WORTH if best.fits else 0.0
    parts: Parts = tuple((slot,) for slot in problem.slots)
    while True:
        found: dict[Parts, Estimate] = {}
        for pairs in (True, False):
            for each in () if found else _ways_to_join(problem.profile, parts, pairs):
                enough = len(each) >= (problem.stages or 1)
                if enough and (plan := _fitting(problem, in_flight, each, above)) is not None:
                    found[each] = plan
        if not found:
            return best
        parts = max(found, key=lambda each: found[each].rate)
        best, above = found[parts], found[parts].rate


def plan_with_shares(
    problem: PlanningProblem,
    in_flight: int | None,
    parts: Parts,
    shares: Mapping[tuple[DeviceSlot, ...], Sequence[float]],
) -> Estimate:
    """Return the best plan with a stage on each of ``parts``, in their order. Any device may lack memory in it.

    ``parts`` has the devices of each stage, on one node. The first device has the unsplit weights. ``shares`` has the
    devices' shares for each part with several devices.

    Raises:
        SettingError: as :func:`~lightning_hetpipe.planning.search.choice.best_plan` does.
    """
    return _best(replace(problem, spread=False, ordered=True, stages=len(parts)), in_flight, parts, shares=shares)


def _ways_to_join(profile: Profile, parts: Parts, pairs: bool) -> Iterator[Parts]:
    """Yield ways to join two of ``parts`` on one node, or all of a node. Of ways that join equal devices yield one."""

    def main_first(slot: DeviceSlot) -> tuple[float, float]:
        memory = math.inf if slot.device.memory is None else slot.device.memory
        return -memory, sum(each.forward + each.backward for each in profile.times_on(slot.device))

    nodes = [[part for part in parts if part[0].node == node] for node in {part[0].node for part in parts}]
    seen = set[object]()
    for joining in [
        each for own in nodes if len(own) > 1 for each in (combinations(own, 2) if pairs else [tuple(own)])
    ]:
        kinds = tuple(sorted(tuple(sorted((each.node, repr(each.device)) for each in part)) for part in joining))
        if kinds not in seen:
            seen.add(kinds)
            joined = tuple(sorted(chain(*joining), key=main_first))
            yield (*(part for part in parts if part not in joining), joined)


def _fitting(problem: PlanningProblem, in_flight: int | None, parts: Parts, above: float) -> Estimate | None:
    """Return the plan with these groups if it is faster than ``above`` and all devices have room."""
    most: dict[tuple[DeviceSlot, ...], Sequence[float]] = {part: [1.0] * len(part) for part in parts}
    for _ in range(RETRIES):
        found = _best(problem, in_flight, parts, most)
        if not found.fits or found.rate <= above:
            return None
        divided = [stage.divided for stage in found.stages if stage.divided is not None and stage.divided.overflow]
        if not divided:
            return found
        most |= {each.slots: each.room for each in divided}
    return None


def _best(
    problem: PlanningProblem,
    in_flight: int | None,
    parts: Parts,
    most: Mapping[tuple[DeviceSlot, ...], Sequence[float]] = {},
    shares: Mapping[tuple[DeviceSlot, ...], Sequence[float]] = {},
) -> Estimate:
    """Return the best plan of these groups. Runs of layers that its stages cut have the times of their parts.

    The search itself takes each part of a run as divisible. If stages that begin within runs lose by that, they
    may begin before or behind these runs, and in another order of the groups.
    """
    joined = _Joined(problem, parts, most, shares)
    found = best_plan(joined.problem, in_flight)
    first = tuple(stage.first for stage in found.stages)
    if _cut(problem.profile, first).widths == problem.profile.widths:
        return joined.apart(found)
    slots = tuple(stage.slot for stage in found.stages)
    orders = [slots] if problem.ordered else permutations(slots)
    plans = list[Estimate]()
    ways = ((order, splits) for order in orders for splits in _beside_runs(problem.profile, first))
    for order, splits in islice(ways, MOST_WAYS):
        joined = _Joined(replace(problem, profile=_cut(problem.profile, splits)), parts, most, shares)
        again = joined.problem.estimate(order, splits, found.in_flight)
        plans.append(joined.apart(replace(again, idle=found.idle, reasons=found.reasons, advise=found.advise)))
        if again.rate >= found.rate and again.fits:
            break
    return max(plans, key=lambda plan: (plan.fits, plan.rate))


def _beside_runs(profile: Profile, splits: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield ``splits``, and the ways to begin stages before or behind the runs that ``splits`` part."""
    widths = profile.widths
    ends = {widths[layers[0]].run: layers[-1] + 1 for layers in layers_of_runs(widths, widths)}
    runs = [widths[split].run if split in widths else split for split in splits]
    options = [(split,) if run == split else (split, run, ends[run]) for split, run in zip(splits, runs, strict=True)]
    for each in product(*options):
        if all(one < other for one, other in pairwise((*each, len(profile.layers)))):
            yield each


class _Joined:
    """Planning ``problem`` in which the devices of each of ``parts`` are one device, named for its group.

    ``most`` has the fraction of layers' units for which devices have room, by default all. ``shares`` has the shares of
    groups that are not divided in the fastest way.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        parts: Parts,
        most: Mapping[tuple[DeviceSlot, ...], Sequence[float]],
        shares: Mapping[tuple[DeviceSlot, ...], Sequence[float]],
    ) -> None:
        profile, cluster = problem.profile, problem.cluster
        self._times = {part: group_times(profile, cluster, part, most.get(part), shares.get(part)) for part in parts}
        prefix = [f"{node.name} " if len(cluster.nodes) > 1 else "" for node in cluster.nodes]
        names = {part: prefix[part[0].node] + " + ".join(map(str, part)) for part in parts}
        guessed = [part for part in parts if any(profile.name_of(slot.device) in profile.estimated for slot in part)]
        nodes, places = list[Node](), dict[tuple[int, int], tuple[DeviceSlot, ...]]()
        for number, node in enumerate(cluster.nodes):
            here = [part for part in parts if part[0].node == number]
            places |= {(number, index): part for index, part in enumerate(here)}
            devices = [Device(names[part], part[0].device.memory) for part in here]
            nodes.append(Node(node.name, devices or node.devices, node.own_link))
        cluster = Cluster(nodes, cluster.between)
        self._parts = {slot: places[at] for slot in cluster.slots if (at := (slot.node, slot.number)) in places}
        times = {names[part]: found.times for part, found in self._times.items()}
        profile = replace(profile, times=times, estimated={names[part]: names[part] for part in guessed})
        self.problem = replace(problem, profile=profile, cluster=cluster, slots=tuple(self._parts))

    def apart(self, found: Estimate) -> Estimate:
        """Convert ``found``, a plan for the groups, to a plan for their devices."""
        idle = tuple(slot for each in found.idle for slot in self._parts[each])
        stages = list[StageEstimate]()
        for stage in found.stages:
            part = self._parts[stage.slot]
            counts = {n: own for n, own in self._times[part].counts.items() if stage.first <= n <= stage.last}
            divided = DividedStage.of(stage, part, self.problem.profile, counts, found.recompute) if counts else None
            stages.append(replace(stage, slot=part[0], divided=divided))
        return replace(found, stages=tuple(stages), idle=idle)


def _cut(profile: Profile, splits: Sequence[int]) -> Profile:
    """End the runs of ``profile`` where stages end. Behind a cut, layers are divided from the next possible start."""
    widths = dict[int, LayerWidths]()
    for first, after in pairwise([*splits, len(profile.layers)]):
        begun = dict[int, int]()
        for layer in range(first, after):
            own = profile.widths.get(layer)
            if own is not None and (own.units or own.run in begun):
                widths[layer] = replace(own, run=begun.setdefault(own.run, layer))
    return replace(profile, widths=widths)
