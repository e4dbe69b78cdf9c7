"""Estimate of stages: their times, their memory, and the simulated minibatches per second."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot
from lightning_hetpipe.planning.model.divided_stage import DividedStage
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.model.simulate import Simulation, StageLoad, StageTimes, Visits, WorkerPipeline
from lightning_hetpipe.planning.model.stage_memory import StageMemory
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.rules.schedule import calls, segments
from lightning_hetpipe.rules.versions import Versions

INSTANT = 1e-12
"""Shortest time in seconds by which anything is divided, because a profile may say that layers take no time."""


@dataclass(frozen=True)
class StageEstimate:
    """One stage of an estimate, from layer ``first`` to layer ``last`` of the profile, both inclusive.

    Attributes:
        times: Seconds for one minibatch. ``times.total`` of the slowest stage is T_max.
        held: Largest number of minibatches whose activations the stage holds at once.
        load: What the stage holds when it takes most memory.
        divided: Group that divides the layers, with ``slot`` as its first device. None if ``slot`` is alone.
    """

    slot: DeviceSlot
    first: int
    last: int
    times: StageTimes
    memory: StageMemory
    held: int
    load: StageLoad
    divided: DividedStage | None = None

    @property
    def taken(self) -> Mapping[DeviceSlot, int]:
        """Bytes that the stage takes of each of its devices."""
        if self.divided is None:
            return {self.slot: self.memory.total}
        return dict(zip(self.divided.slots, self.divided.taken, strict=True))

    @property
    def limit(self) -> int | None:
        """Bytes of the device, or None if its memory is no limit."""
        return self.slot.device.memory

    @property
    def overflow(self) -> int:
        """Bytes that the device lacks, 0 if the stage fits."""
        return 0 if self.limit is None else max(0, self.memory.total - self.limit)


@dataclass(frozen=True)
class Help:
    """Changes that would make a plan fit.

    Attributes:
        in_flight: Largest Nm at which some plan fits, or None.
        recompute: Nm at which some plan fits with ``recompute=True``: the largest up to the requested Nm, or the best
            Nm if none was requested. None if no plan fits, or if ``recompute`` is set already.
    """

    in_flight: int | None
    recompute: int | None


@dataclass(frozen=True)
class Estimate:
    """Estimate of one virtual worker, for given stages or for a plan that was searched for.

    Attributes:
        rate: Simulated minibatches per second, from ``simulation``.
        spread: Whether this is a spread run: the stages are devices, with one minibatch among them.
        idle: Devices that the plan does not use.
        reasons: Sentences that explain the choice of the plan.
        advise: Searches, perhaps for a long time, for changes that make the plan fit. None if it fits.
    """

    stages: tuple[StageEstimate, ...]
    versions: Versions
    recompute: bool
    rate: float
    simulation: Simulation
    spread: bool
    idle: tuple[DeviceSlot, ...] = ()
    reasons: tuple[str, ...] = ()
    advise: Callable[[], Help] | None = field(default=None, repr=False, compare=False)

    @property
    def in_flight(self) -> int:
        """Nm."""
        return self.versions.in_flight

    @property
    def fits(self) -> bool:
        return not any(stage.overflow for stage in self.stages)

    @property
    def bottleneck(self) -> float:
        """T_max in seconds."""
        return max(stage.times.total for stage in self.stages)

    @cached_property
    def help(self) -> Help | None:
        """Changes that would make the plan fit, or None if it fits."""
        return None if self.advise is None else self.advise()

    def ways_out(self, cli: bool = False) -> list[str]:
        """List a phrase for each way to make the plan fit. The list is empty if it fits, or if nothing helps.

        With ``cli``, settings are written as on the command line.
        """
        if (found := self.help) is None:
            return []
        prefix, true = ("strategy.", "true") if cli else ("", "True")
        lines = []
        if found.in_flight is not None:
            lines.append(f"{prefix}in_flight={found.in_flight}{' or fewer' if found.in_flight > 1 else ''}")
        if found.recompute is not None:
            fewer = " or fewer" if found.recompute > 1 else ""
            lines.append(f"{prefix}recompute={true}, with {prefix}in_flight={found.recompute}{fewer}")
        lacks = [f"{in_bytes(stage.overflow)} on {stage.slot}" for stage in self.stages if stage.overflow]
        return [*lines, f"more memory: {' and '.join(lacks)}"] if lacks else lines


def lacking(stages: Iterable[StageEstimate]) -> dict[DeviceSlot, int]:
    """Return the bytes that each device lacks for ``stages``, which may share devices. Omit devices with room."""
    taken = Counter[DeviceSlot]()
    for stage in stages:
        taken.update(stage.taken)
    limits = ((slot, slot.device.memory) for slot in taken)
    return {slot: taken[slot] - limit for slot, limit in limits if limit is not None and taken[slot] > limit}


def times_on(
    profile: Profile,
    cluster: Cluster,
    slots: Sequence[DeviceSlot],
    splits: Sequence[int],
    wave: int,
    recompute: bool = False,
) -> tuple[list[StageTimes], WorkerPipeline]:
    """Return the times of stages on ``slots`` that start at the layers ``splits``, and their pipeline.

    Lightning's step takes the longest of the stages' times for updating their weights. With ``recompute``, each
    backward takes the time of the forward in addition, except on the last stage.
    """
    own, ends = [profile.times_on(slot.device) for slot in slots], [*splits[1:], len(profile.layers)]
    links = itertools.starmap(cluster.link_between, pairwise(slots))
    hops = [0.0, *map(profile.crossing, links, splits[1:]), 0.0]

    def times(stage: int, first: int, after: int, often: int = 1) -> StageTimes:
        layers = own[stage][first:after]
        forward, backward = sum(each.forward for each in layers), sum(each.backward for each in layers)
        return StageTimes(
            forward / often,
            (backward + (forward if recompute and stage + 1 < len(slots) else 0.0)) / often,
            receive=hops[stage] / often if first == splits[stage] else 0.0,
            receive_gradient=hops[stage + 1] / often if after == ends[stage] else 0.0,
        )

    places = [*zip(range(len(slots)), splits, ends, strict=True)]
    stages = list(itertools.starmap(times, places))
    step = max(sum(each.update for each in own[stage][first:after]) for stage, first, after in places)
    if not profile.calls:
        return stages, WorkerPipeline(stages, wave, step)
    pieces = profile.pieces
    parts = segments([after - first for first, after in pieces], splits)
    changing = {
        part.index
        for part in parts
        if any(layer.changes_buffers for layer in profile.layers[part.first : part.last + 1])
    }
    visits = Visits(parts, calls(map(pieces.index, profile.calls)), changing)
    found = [times(part.stage, part.first, part.last + 1, profile.called(part.first)) for part in parts]
    return stages, WorkerPipeline(found, wave, step, visits)
