"""Plans whose stages may lie on groups of devices, where these beat the best plan without groups.

Each way to join devices of a node into groups is planned for as if each group were one device. Its times are those of
layers that it divides (:mod:`~lightning_hetpipe.planning.model.group_times`), and its memory is that of its device with
most, which holds the unsplit weights. Ways that could not be faster even without transfers between stages are left out.
Where there are too many, pairs are joined one after the other, as long as that helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice, pairwise, product

from lightning_hetpipe.planning.model.cluster import Cluster, Device, DeviceSlot, Node
from lightning_hetpipe.planning.model.divided_stage import DividedStage
from lightning_hetpipe.planning.model.estimate import StageEstimate
from lightning_hetpipe.planning.model.group_times import group_times
from lightning_hetpipe.planning.model.profile import LayerWidths, Profile
from lightning_hetpipe.planning.search.choice import Choice, best_plan
from lightning_hetpipe.planning.search.problem import PlanningProblem

WORTH = 1.03
"""Least ratio of rates at which groups are worth their trouble."""

MOST_WAYS, MOST_DEVICES = 100, 8
"""Numbers of ways to join devices, and of devices, above which pairs are joined one after the other."""

RETRIES = 3
"""Number of times that members get less where they lack memory."""

Parts = tuple[tuple[DeviceSlot, ...], ...]
"""Devices of each group; most are alone."""


def plan_with_groups(problem: PlanningProblem, in_flight: int | None = None) -> Choice:
    """The plan with groups of devices that is over 1.03 times as fast as the best one without, where there is one; else
    the latter.

    Args:
        problem: What is asked of the plan; the ``widths`` of its profile say what can be divided.
        in_flight: Nm, where it is not to be chosen.

    Raises:
        SettingError: as :func:`~lightning_hetpipe.planning.search.choice.best_plan` does.
    """
    plain = best_plan(problem, in_flight)
    if not problem.profile.widths or len(problem.slots) == 1 or problem.ordered:
        return plain
    search = _GroupSearch(replace(problem, spread=False), in_flight, plain)
    ways = [*search.ways()] if len(problem.slots) <= MOST_DEVICES else []
    if 0 < len(ways) <= MOST_WAYS:
        for parts in sorted(ways, key=search.bound):
            search.look(parts)
    else:
        search.join()
    return search.found


def plan_with_shares(
    problem: PlanningProblem,
    in_flight: int | None,
    parts: Parts,
    shares: Mapping[tuple[DeviceSlot, ...], Sequence[float]],
) -> Choice:
    """The best plan with a stage on each of ``parts``, in their order; it may lack memory on any of their devices.

    Args:
        problem: What is asked of the plan; the ``widths`` of its profile say what can be divided.
        in_flight: Nm, where it is not to be chosen.
        parts: Devices of each stage, of one node; the first one has the unsplit weights.
        shares: Of each device, for those parts that have several.

    Raises:
        SettingError: as :func:`~lightning_hetpipe.planning.search.choice.best_plan` does.
    """
    return _best(replace(problem, spread=False, ordered=True, stages=len(parts)), in_flight, parts, shares=shares)


class _GroupSearch:
    def __init__(self, problem: PlanningProblem, in_flight: int | None, plain: Choice) -> None:
        self.found = plain
        self._least = plain.rate * WORTH if plain.fits else 0.0
        self._problem = problem
        self._in_flight = in_flight
        self._bounds: dict[tuple[DeviceSlot, ...], float] = {}

    def ways(self) -> Iterator[Parts]:
        """Each way to join devices that is not the same as another one with devices that are alike, at most one more
        than are looked at."""
        seen = set[object]()
        for parts in _partitions(self._problem.slots):
            alike = _kinds(parts)
            if len(parts) < len(self._problem.slots) and alike not in seen:
                seen.add(alike)
                yield tuple(map(self._with_main_first, parts))
                if len(seen) > MOST_WAYS:
                    return

    def join(self) -> None:
        """Join two parts at a time."""
        at: Parts = tuple((slot,) for slot in self._problem.slots)
        improves = True
        while improves:
            improves, seen = False, set[object]()
            for one, other in combinations(range(len(at)), 2):
                if at[one][0].node == at[other][0].node:
                    joined = self._with_main_first((*at[one], *at[other]))
                    parts = (*(part for number, part in enumerate(at) if number not in (one, other)), joined)
                    if (alike := _kinds((at[one], at[other]))) in seen:
                        continue
                    seen.add(alike)
                    if self.look(parts):
                        best, improves = parts, True
            at = best if improves else at

    def bound(self, parts: Parts) -> float:
        """Seconds for each minibatch that no plan beats with these groups."""
        return 1 / sum(1 / self._seconds(part) for part in parts)

    def look(self, parts: Parts) -> bool:
        """Plan with these groups; True if that is the best plan yet."""
        if len(parts) < (self._problem.stages or 1) or self.bound(parts) * self._least >= 1:
            return False
        most: dict[tuple[DeviceSlot, ...], Sequence[float]] = {part: [1.0] * len(part) for part in parts}
        for _ in range(RETRIES):
            found = _best(self._problem, self._in_flight, parts, most)
            if not found.fits or found.rate <= self._least:
                return False
            lacking = [stage for stage in found.stages if stage.divided and stage.divided.overflow]
            if not lacking:
                self.found, self._least = found, found.rate
                return True
            for stage in lacking:
                assert stage.divided is not None
                most[stage.divided.slots] = stage.divided.room
        return False

    def _seconds(self, part: tuple[DeviceSlot, ...]) -> float:
        if part not in self._bounds:
            times = group_times(self._problem.profile, self._problem.cluster, part).times
            self._bounds[part] = max(sum(each.forward + each.backward for each in times), 1e-12)
        return self._bounds[part]

    def _with_main_first(self, part: Iterable[DeviceSlot]) -> tuple[DeviceSlot, ...]:
        """The device with most memory first; of several the fastest."""

        def order(slot: DeviceSlot) -> tuple[float, float]:
            memory = math.inf if slot.device.memory is None else slot.device.memory
            return -memory, sum(each.forward + each.backward for each in self._problem.profile.times_on(slot.device))

        return tuple(sorted(part, key=order))


def _best(
    problem: PlanningProblem,
    in_flight: int | None,
    parts: Parts,
    most: Mapping[tuple[DeviceSlot, ...], Sequence[float]] = {},
    shares: Mapping[tuple[DeviceSlot, ...], Sequence[float]] = {},
) -> Choice:
    """The best plan of these groups, with the times of runs that its stages leave whole.

    It is searched as if each part of a run could be divided. Where a stage begins within a run, it may better begin
    before or behind it.
    """
    joined, profile = _Joined(problem, parts, most, shares), problem.profile
    found = best_plan(joined.problem, in_flight)
    first = tuple(stage.first for stage in found.stages)
    if _cut(profile, first).widths == profile.widths:
        return joined.apart(found)
    plans: list[Choice] = []
    for splits in _beside_runs(profile, first):
        joined = _Joined(replace(problem, profile=_cut(profile, splits)), parts, most, shares)
        again = joined.problem.estimate([stage.slot for stage in found.stages], splits, found.in_flight)
        plans.append(joined.apart(Choice.of(again, found.idle, found.tried, found.reasons, found.advise)))
    return max(plans, key=lambda each: (each.fits, each.rate))


class _Joined:
    """The devices of each of ``parts`` as one.

    Args:
        problem: The problem with the devices of ``parts``.
        parts: The groups, and the devices that are alone.
        most: Of each, the part of layers' units that its devices have room for; by default all.
        shares: Of each group that is not divided as is fastest, the shares of its devices.

    Attributes:
        problem: The problem with each group as one device, and its times by a name that stands for it.
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

    def apart(self, found: Choice) -> Choice:
        """``found``, a plan for the groups, as one of their devices."""
        idle = tuple(slot for each in found.idle for slot in self._parts[each])
        stages = tuple(self._apart(stage, found.recompute) for stage in found.stages)
        return replace(found, stages=stages, idle=idle)

    def _apart(self, stage: StageEstimate, recompute: bool) -> StageEstimate:
        part = self._parts[stage.slot]
        counts = {n: own for n, own in self._times[part].counts.items() if stage.first <= n <= stage.last}
        divided = DividedStage.of(stage, part, self.problem.profile, counts, recompute) if counts else None
        return replace(stage, slot=part[0], divided=divided)


def _kinds(parts: Parts) -> tuple[tuple[tuple[int, str], ...], ...]:
    """Kinds of devices in each of ``parts``, whatever their order."""
    return tuple(sorted(tuple(sorted((each.node, repr(each.device)) for each in part)) for part in parts))


def _cut(profile: Profile, splits: Sequence[int]) -> Profile:
    """``profile`` whose runs end where stages do: what follows there is divided only from the next layer on that can
    begin to be."""
    widths = dict[int, LayerWidths]()
    for first, after in pairwise([*splits, len(profile.layers)]):
        begun = dict[int, int]()
        for layer in range(first, after):
            own = profile.widths.get(layer)
            if own is not None and (own.units or own.run in begun):
                widths[layer] = replace(own, run=begun.setdefault(own.run, layer))
    return replace(profile, widths=widths)


def _beside_runs(profile: Profile, splits: Sequence[int]) -> list[tuple[int, ...]]:
    """``splits``, and the ways to have those that part a run before or behind it instead."""
    ends = {own.run: layer + 1 for layer, own in sorted(profile.widths.items())}  # of each the last layer's
    runs = [profile.widths[split].run if split in profile.widths else split for split in splits]
    options = [(split,) if run == split else (split, run, ends[run]) for split, run in zip(splits, runs, strict=True)]
    ways = islice(product(*options), MOST_WAYS)
    return [each for each in ways if all(one < other for one, other in pairwise((*each, len(profile.layers))))]


def _partitions(slots: Sequence[DeviceSlot]) -> Iterator[Parts]:
    """Each way to put ``slots`` into parts of one node."""
    if not slots:
        yield ()
        return
    first, rest = slots[0], slots[1:]
    near = [slot for slot in rest if slot.node == first.node]
    for size in range(len(near) + 1):
        for others in combinations(near, size):
            for parts in _partitions([slot for slot in rest if slot not in others]):
                yield ((first, *others), *parts)
