"""Allocations: a grouping of devices, a plan for each virtual worker, their waves, and the resulting throughput.

All virtual workers have one Nm. It begins with the largest Nm that one of their plans would choose alone, as far as all
have memory for it. It is raised while that hides more of the synchronisation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import TypeAlias

from lightning_hetpipe.planning.allocation.groupings import Group, Grouping
from lightning_hetpipe.planning.model.cluster import Cluster, Device, DeviceSlot, Link
from lightning_hetpipe.planning.model.cluster_simulation import ClusterSimulation, simulate_cluster
from lightning_hetpipe.planning.model.estimate import INSTANT, Estimate, lacking, times_on
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.model.simulate import Crossing, PlacedWeights, WorkerPipeline
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.rules.waves import place_parameters, staleness_bound, throughput, wave_lengths

WAVES = 9
"""Simulated waves. The first third, and waves of a clock distance, count as the start."""

JITTER = 0.01
"""Variation of simulated tasks of several virtual workers.

Without any variation, equal virtual workers would do the same at the same moment: all would want the network at once,
and ties would decide. The size of the variation does not matter.
"""

MOST_DISTANCE = 16
"""Largest clock distance that adds to the simulated waves."""

NEAR = 0.99
"""Fraction of the best throughput at which the smallest Nm is good enough."""

MOST_UNEQUAL = 64
"""Largest ratio of two waves. Longer waves make weights staler than any learning rate bears."""

HIDING = 6
"""Largest number by which Nm is raised above the pipelines' own need, to hide synchronisation."""

Kinds: TypeAlias = tuple[tuple[Link, tuple[Device, ...]], ...]
"""For each node of a group, the link between its devices and the devices, in an order that equal groups share."""


@dataclass(frozen=True)
class Allocation:
    """A grouping with the plans, waves and simulation that follow from it.

    Attributes:
        name: Name such as "ed".
        choices: Plan of each virtual worker at one Nm if all fit, else the plans that lack the least memory.
        lengths: W_v of each virtual worker.
        placement: Setting for which server holds which parameter.
        servers: Node of each parameter server. Empty for one virtual worker.
        simulation: Run of all virtual workers, or None if one does not fit.
    """

    name: str
    grouping: Grouping
    choices: tuple[Estimate, ...]
    lengths: tuple[int, ...]
    placement: str
    servers: tuple[int, ...]
    clock_distance: int
    simulation: ClusterSimulation | None

    @property
    def fits(self) -> bool:
        return self.simulation is not None

    @cached_property
    def rate(self) -> float:
        """Simulated minibatches per second of all virtual workers together, or 0 if one does not fit."""
        if self.simulation is None:
            return 0.0
        # Versions come in bunches, so a window may begin behind a bunch and end behind another.
        most = self._most([1 / max(choice.bottleneck, INSTANT) for choice in self.choices])
        return min(most, self.simulation.rate(self.simulation.waves // 3))

    @property
    def alone(self) -> float:
        """Minibatches per second of all virtual workers together without synchronisation."""
        return self._most([choice.rate for choice in self.choices])

    def _most(self, rates: Sequence[float]) -> float:
        """Limit the joint throughput of virtual workers with ``rates`` by the work on shared devices."""
        found = throughput(self.lengths, rates)
        for slot in shared_devices(self.choices):
            busy = sum(
                length * (stage.times.forward + stage.times.backward)
                for choice, length in zip(self.choices, self.lengths, strict=True)
                for stage in choice.stages
                if stage.slot == slot
            )
            found = min(found, sum(self.lengths) / max(busy, INSTANT))
        return found

    @property
    def rates(self) -> list[float]:
        """Minibatches per second of each virtual worker: its part of the joint rate."""
        return [self.rate * length / sum(self.lengths) for length in self.lengths]

    @property
    def in_flight(self) -> int:
        """Nm."""
        return self.choices[0].in_flight

    @property
    def staleness(self) -> int:
        """s_global: the most minibatches of one virtual worker that another's weights lack. With N = 1, s_local."""
        return most_stale(self.lengths, self.in_flight, self.clock_distance)

    @property
    def network_bytes(self) -> float:
        """Bytes that cross the network between nodes for each minibatch: activations, updates and weights."""
        if self.simulation is None:
            return 0.0
        sent = sum(nbytes for name, nbytes in self.simulation.traffic.items() if name.endswith(" out"))
        served = sum(nbytes for name, nbytes in self.simulation.traffic.items() if name.endswith(" server out"))
        return (sent - served) / (self.simulation.waves * sum(self.lengths))

    @property
    def unfit(self) -> tuple[int, ...]:
        """Indices of the virtual workers with too little memory."""
        full = overfull(self.choices)
        return tuple(
            index
            for index, choice in enumerate(self.choices)
            if not choice.fits or any(stage.slot in full for stage in choice.stages)
        )

    @property
    def lacking(self) -> int:
        """Bytes that devices lack, in sum."""
        return sum(overfull(self.choices).values())


def overfull(choices: Sequence[Estimate]) -> dict[DeviceSlot, int]:
    """Return the bytes that each device lacks for the stages of all virtual workers there. Omit devices with room."""
    return lacking(stage for choice in choices for stage in choice.stages)


def most_stale(lengths: Sequence[int], in_flight: int, clock_distance: int) -> int:
    """Return s_global: the largest :func:`~lightning_hetpipe.rules.waves.staleness_bound` of two virtual workers.

    ``lengths`` are their waves. With N = 1 the result is s_local.
    """
    workers = range(len(lengths))
    pairs = ((vw, of) for vw in workers for of in workers if vw != of)
    bounds = (staleness_bound(lengths, vw, of, in_flight, clock_distance) for vw, of in pairs)
    return max(bounds, default=in_flight - 1)


class GroupPlans:
    """Cache of plans for groups, all with the requirements of ``problem``. Groups of equal kinds share a plan."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        self._rates: dict[Kinds, float] = {}
        self._known: dict[tuple[Kinds, int | None, bool], tuple[Estimate, Group]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def kinds(self, group: Sequence[DeviceSlot]) -> Kinds:
        """Return the kinds of the devices of ``group``."""
        return self._sorted(group)[0]

    def rate(self, group: Sequence[DeviceSlot]) -> float:
        """Return the minibatches per second of ``group`` by a brief search, or 0 if no plan fits."""
        kinds, slots = self._sorted(group)
        if kinds not in self._rates:
            found = best_plan(replace(self._problem, slots=slots, brief=True))
            self._rates[kinds] = found.rate if found.fits else 0.0
        return self._rates[kinds]

    def plan(self, group: Sequence[DeviceSlot], in_flight: int | None = None, *, fewer: bool = False) -> Estimate:
        """Return the plan of ``group``. Arguments and errors are as for
        :func:`~lightning_hetpipe.planning.search.choice.best_plan`."""
        kinds, slots = self._sorted(group)
        if (key := (kinds, in_flight, fewer)) not in self._known:
            choice = self._found(slots, in_flight, fewer)
            self._known[key] = choice, slots
            if choice.fits and fewer:
                self._known[kinds, choice.in_flight, False] = self._known[kinds, choice.in_flight, True] = choice, slots
        choice, others = self._known[key]
        mine = dict(zip(others, slots, strict=True))
        return replace(
            choice,
            stages=tuple(replace(stage, slot=mine[stage.slot]) for stage in choice.stages),
            idle=tuple(mine[slot] for slot in choice.idle),
        )

    def _found(self, slots: Group, in_flight: int | None, fewer: bool) -> Estimate:
        return best_plan(replace(self._problem, slots=slots), in_flight, fewer=fewer)

    def _sorted(self, group: Sequence[DeviceSlot]) -> tuple[Kinds, Group]:
        nodes: dict[int, list[DeviceSlot]] = {}
        for slot in sorted(group, key=lambda slot: (repr(slot.device), slot.number)):
            nodes.setdefault(slot.node, []).append(slot)
        kinds = {
            node: (self._problem.cluster.nodes[node].own_link, tuple(slot.device for slot in slots))
            for node, slots in nodes.items()
        }
        order = sorted(nodes, key=lambda node: (repr(kinds[node]), node))
        return tuple(kinds[node] for node in order), tuple(slot for node in order for slot in nodes[node])


@dataclass(eq=False)
class Allocator:
    """Maker of allocations of the devices of a cluster.

    Attributes:
        problem: Requirements of each virtual worker's plan, and the cluster whose links all share.
        in_flight: Nm, or None to choose it.
        wave: Smallest W, or None to choose it. A weight policy or shares may make waves longer.
        clock_distance: D.
    """

    problem: PlanningProblem
    _: KW_ONLY
    in_flight: int | None = None
    wave: int | None = None
    clock_distance: int = 0

    def __post_init__(self) -> None:
        self.profile, self.cluster = self.problem.profile, self.problem.cluster
        self.plans = GroupPlans(self.problem)
        self._speeds: dict[Device, float] = {}

    def speed(self, slot: DeviceSlot) -> float:
        """Return the minibatches per second of the whole model on one device, whatever its memory."""
        if slot.device not in self._speeds:
            seconds = sum(each.forward + each.backward for each in self.profile.times_on(slot.device))
            self._speeds[slot.device] = 1 / max(seconds, INSTANT)
        return self._speeds[slot.device]

    def allocate(
        self, name: str, grouping: Grouping, *, shares: bool, placement: str = "size", plans: GroupPlans | None = None
    ) -> Allocation:
        """Make the allocation of ``grouping``, called ``name``.

        Args:
            shares: Whether faster virtual workers get longer waves, and so larger shares of the data.
            placement: As for :func:`~lightning_hetpipe.rules.waves.place_parameters`.
            plans: Plans of the groups, by default :attr:`plans`.

        Raises:
            SettingError: if a virtual worker cannot be planned as asked.
        """
        plans = self.plans if plans is None else plans
        in_flight = self._least(grouping, plans)
        if in_flight is None:
            choices = [plans.plan(group, 1 if self.in_flight is None else self.in_flight) for group in grouping]
            lengths, where = (1,) * len(choices), (placement, (), self.clock_distance)
            return Allocation(name, grouping, tuple(choices), lengths, *where, simulation=None)
        found: list[Allocation] = []
        for more in range(HIDING + 1):
            if not self.problem.versions(in_flight + more).is_possible:
                break
            choices = [plans.plan(group, in_flight + more, fewer=more > 0) for group in grouping]
            if any(choice.in_flight < in_flight + more for choice in choices) or overfull(choices):
                break
            found.append(self._simulated(name, grouping, choices, shares, placement))
            if self.in_flight is not None or found[-1].rate >= NEAR * found[-1].alone or len(grouping) == 1:
                break
            if max(each.rate for each in found[-2:]) * NEAR < max((each.rate for each in found[:-2]), default=0.0):
                break  # two more have brought nothing
        best = max(each.rate for each in found)
        return next(each for each in found if each.rate >= NEAR * best)

    def _least(self, grouping: Grouping, plans: GroupPlans) -> int | None:
        """Find the Nm to begin with, or None if the plans do not all fit at any Nm."""
        if self.in_flight is not None:
            asked = [plans.plan(group, self.in_flight) for group in grouping]
            return self.in_flight if all(choice.fits for choice in asked) and not overfull(asked) else None
        alone = [plans.plan(group) for group in grouping]
        if not all(choice.fits for choice in alone):
            return None
        found = max(choice.in_flight for choice in alone)
        while found:
            choices = [plans.plan(group, found, fewer=True) for group in grouping]
            if (most := min(choice.in_flight for choice in choices)) < found:
                found = most  # another one may have found no plan there
            elif overfull(choices):
                found -= 1
            else:
                return found
        return None

    def waves(self, rates: Sequence[float], in_flight: int, shares: bool) -> tuple[int, ...]:
        """Return W_v for virtual workers with ``rates``. With ``shares``, waves are whole optimizer steps."""
        unit = self.problem.every if self.problem.weights.by_window or shares else 1
        least = -(-max(in_flight, self.wave or 0) // unit)
        bounded = [min(rate, MOST_UNEQUAL * min(rates)) for rate in rates]
        lengths = wave_lengths(bounded, least) if shares else (least,) * len(rates)
        return tuple(unit * length for length in lengths)

    def _simulated(
        self, name: str, grouping: Grouping, choices: Sequence[Estimate], shares: bool, placement: str
    ) -> Allocation:
        in_flight = choices[0].in_flight
        lengths = self.waves([choice.rate for choice in choices], in_flight, shares)
        # Servers run on nodes of last stages in the order of virtual workers, then on other used nodes.
        used = {stage.slot.node for choice in choices for stage in choice.stages}
        nodes = dict.fromkeys([*(choice.stages[-1].slot.node for choice in choices), *sorted(used)])
        servers = [*nodes] if len(choices) > 1 else []
        pipelines = worker_pipelines(self.profile, self.cluster, choices, lengths, servers, placement)
        run = simulate_cluster(
            pipelines,
            in_flight,
            WAVES + 3 * min(self.clock_distance, MOST_DISTANCE) // 2,
            cluster=self.cluster,
            servers=servers,
            clock_distance=self.clock_distance,
            jitter=JITTER if len(choices) > 1 else 0.0,
            versions=choices[0].versions,
        )
        where = (placement, tuple(servers), self.clock_distance)
        return Allocation(name, grouping, tuple(choices), lengths, *where, run)


def worker_pipelines(
    profile: Profile,
    cluster: Cluster,
    workers: Sequence[Estimate],
    lengths: Sequence[int],
    servers: Sequence[int],
    placement: str,
) -> list[WorkerPipeline]:
    """Make virtual workers with waves of ``lengths`` minibatches, whose weights lie on ``servers`` by ``placement``.

    Without servers they do not synchronise.

    Raises:
        SettingError: if ``placement`` is unknown.
    """
    weights = _placed(profile, workers, servers, placement) if servers else [[] for _ in workers]
    shared = shared_devices(workers)
    # The simulation itself computes how long bytes take over the network, but adds no latency.
    latency = Cluster(cluster.nodes, Link(math.inf, cluster.between.latency))
    found = []
    for worker, wave, own in zip(workers, lengths, weights, strict=True):
        slots, splits = [stage.slot for stage in worker.stages], [stage.first for stage in worker.stages]
        _, pipeline = times_on(profile, latency, slots, splits, wave, worker.recompute)
        firsts = [part.first for part in pipeline.visits.segments] if pipeline.visits else splits
        forwards, gradients = {}, {}
        leader, first = slots[-1].node, slots[0].node
        given = sum(layer.given for layer in profile.layers[: (*splits, len(profile.layers))[1]])
        if given and leader != first:  # the user's code runs where the last stage is, and has the batch there
            forwards[0] = Crossing(given / profile.called(0), leader, first)
        for index in range(1, len(slots)):
            source, target = slots[index - 1].node, slots[index].node
            if source != target:
                nbytes, segment = profile.layers[splits[index] - 1].output, firsts.index(splits[index])
                forwards[segment] = Crossing(nbytes / profile.called(splits[index]), source, target)
                gradients[segment - 1] = Crossing(nbytes / profile.called(splits[index] - 1), target, source)
        devices = {index: slot for index, slot in enumerate(slots) if slot in shared}
        found.append(replace(pipeline, forwards=forwards, gradients=gradients, weights=own, devices=devices))
    return found


def shared_devices(workers: Sequence[Estimate]) -> set[DeviceSlot]:
    """Return the devices with stages of several virtual workers."""
    used = Counter(slot for worker in workers for slot in {stage.slot for stage in worker.stages})
    return {slot for slot, count in used.items() if count > 1}


def _placed(
    profile: Profile, workers: Sequence[Estimate], servers: Sequence[int], placement: str
) -> list[list[PlacedWeights]]:
    homes = []  # for each virtual worker the node of each layer, and last the node of modules beside the layers
    for worker in workers:
        nodes = [stage.slot.node for stage in worker.stages for _ in range(stage.first, stage.last + 1)]
        homes.append([*nodes, nodes[-1]])
    sizes = [*(layer.parameters for layer in profile.layers), profile.user.trained]
    beside = [servers.index(node) for node in homes[0]]
    placed = place_parameters(sizes, len(servers), placement, beside)
    server = {index: number for number, indices in enumerate(placed) for index in indices}
    found = []
    for nodes in homes:
        held: Counter[tuple[int, int]] = Counter()
        for index, nbytes in enumerate(sizes):
            held[nodes[index], server[index]] += nbytes
        found.append([PlacedWeights(*where, nbytes) for where, nbytes in held.items() if nbytes])
    return found
