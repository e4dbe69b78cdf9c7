"""Estimate of stages: their times, their memory, and the simulated minibatches per second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot
from lightning_hetpipe.planning.model.divided_stage import DividedStage
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.model.simulate import Simulation, StageLoad, StageTimes, Visits
from lightning_hetpipe.planning.model.stage_memory import StageMemory
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.rules.schedule import calls, segments
from lightning_hetpipe.rules.versions import Versions

INSTANT = 1e-12
"""Shortest time to divide by, in seconds: layers may be said to take no time."""


@dataclass(frozen=True)
class StageEstimate:
    """One stage of an estimate.

    Attributes:
        slot: The device.
        first, last: Its layers, both inclusive, by their index in the profile.
        times: Seconds for one minibatch; ``times.total`` of the slowest stage is T_max.
        memory: Bytes that it takes of its device.
        held: The most minibatches whose activations it holds at once.
        load: Minibatches that it holds when it takes most.
        divided: The group that divides its layers, of which ``slot`` is the first device; None where that is alone.
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
        """Bytes that it takes of each of its devices."""
        if self.divided is None:
            return {self.slot: self.memory.total}
        return dict(zip(self.divided.slots, self.divided.taken, strict=True))

    @property
    def limit(self) -> int | None:
        """Bytes of its device; None where that is no limit."""
        return self.slot.device.memory

    @property
    def overflow(self) -> int:
        """Bytes that its device lacks; 0 where it fits."""
        return 0 if self.limit is None else max(0, self.memory.total - self.limit)


@dataclass(frozen=True)
class Help:
    """Changes that would make a plan fit that does not.

    Attributes:
        in_flight: The largest Nm at which some plan fits; None if there is none.
        recompute: An Nm at which some plan fits with ``recompute=True``: the largest up to what was asked for, or the
            best; None if there is none, or where that is set already.
        lacking: Bytes that devices of the plan lack, by stage; with so much more memory there it fits.
    """

    in_flight: int | None
    recompute: int | None
    lacking: dict[int, int]


@dataclass(frozen=True)
class Estimate:
    """Estimate of one virtual worker: of given stages, or of a plan that was searched for.

    Attributes:
        stages: In the order of the layers.
        versions: Weights that minibatches use, by the weight policy and Nm.
        recompute: Whether forwards are computed again for their backwards.
        rate: Minibatches per second, simulated.
        simulation: The run that said so.
        spread: Whether it is of a spread run, in which the stages are devices with one minibatch among them.
        idle: Devices that the plan does not use.
        reasons: Sentences that explain the choice of the plan.
        advise: Finds what would make it fit, which may take longer than to find the plan. None if it fits.
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
        """Changes that would make it fit. None if it fits."""
        return None if self.advise is None else self.advise()

    def ways_out(self, cli: bool = False) -> list[str]:
        """List a phrase for each way to make it fit. The list is empty if it fits, or if nothing helps.

        Args:
            cli: Whether settings are given on the command line, not in Python.
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
        if found.lacking:
            each = [f"{in_bytes(more)} on {self.stages[stage].slot}" for stage, more in sorted(found.lacking.items())]
            lines.append(f"more memory: {' and '.join(each)}")
        return lines

    @property
    def allowances(self) -> list[int | None]:
        """Bytes that activations and waiting gradients of each stage may take: those of the plan, and an equal part of
        those that all stages leave of the device; None where its memory is no limit."""
        own = [[each for each in self.stages if each.slot == stage.slot] for stage in self.stages]
        return [
            None
            if stage.limit is None
            else stage.memory.moving + (stage.limit - sum(each.memory.total for each in those)) // len(those)
            for stage, those in zip(self.stages, own, strict=True)
        ]


def lacking(stages: Iterable[StageEstimate]) -> dict[DeviceSlot, int]:
    """Bytes that devices lack for ``stages``, of which several may share one; none for devices that have room."""
    taken = Counter[DeviceSlot]()
    for stage in stages:
        taken.update(stage.taken)
    limits = ((slot, slot.device.memory) for slot in taken)
    return {slot: taken[slot] - limit for slot, limit in limits if limit is not None and taken[slot] > limit}


def stage_times_on(
    profile: Profile, cluster: Cluster, slots: Sequence[DeviceSlot], splits: Sequence[int], recompute: bool = False
) -> list[StageTimes]:
    """Times of stages on ``slots`` that start at the layers ``splits``.

    Where forwards are computed again, a backward takes that much longer, but for the last stage's.
    """
    found = []
    for index, (slot, first, after) in enumerate(zip(slots, splits, [*splits[1:], len(profile.layers)], strict=True)):
        own = profile.times_on(slot.device)[first:after]
        forward, backward = sum(each.forward for each in own), sum(each.backward for each in own)
        last = index + 1 == len(slots)
        found.append(
            StageTimes(
                forward,
                backward + (forward if recompute and not last else 0.0),
                receive=_crossing(profile, cluster, slots[index - 1], slot, first) if index else 0.0,
                receive_gradient=0.0 if last else _crossing(profile, cluster, slot, slots[index + 1], after),
            )
        )
    return found


def step_on(profile: Profile, slots: Sequence[DeviceSlot], splits: Sequence[int]) -> float:
    """Seconds of Lightning's step, as long as the updates of the stage on ``slots`` whose take longest."""
    return max(
        sum(each.update for each in profile.times_on(slot.device)[first:after])
        for slot, first, after in zip(slots, splits, [*splits[1:], len(profile.layers)], strict=True)
    )


def visits_on(
    profile: Profile, slots: Sequence[DeviceSlot], splits: Sequence[int], stages: Sequence[StageTimes], recompute: bool
) -> tuple[Sequence[StageTimes], Visits | None]:
    """Visits of a minibatch to ``stages``, and for each segment the times of one visit.

    Without several calls these are the times of the stages, and None for the visits: one to each.
    """
    if not profile.calls:
        return stages, None
    pieces = profile.pieces
    parts = segments([after - first for first, after in pieces], splits)
    found, changing = [], set[int]()
    for part in parts:
        layers, times = slice(part.first, part.last + 1), stages[part.stage]
        own, often = profile.times_on(slots[part.stage].device)[layers], profile.called(part.first)
        forward, backward = sum(each.forward for each in own), sum(each.backward for each in own)
        ends = part.last + 1 == [*splits[1:], len(profile.layers)][part.stage]
        found.append(
            StageTimes(
                forward / often,
                (backward + (forward if recompute and part.stage + 1 < len(slots) else 0.0)) / often,
                receive=times.receive / often if part.first == splits[part.stage] else 0.0,
                receive_gradient=times.receive_gradient / often if ends else 0.0,
            )
        )
        if any(layer.changes_buffers for layer in profile.layers[layers]):
            changing.add(part.index)
    return found, Visits(parts, calls(map(pieces.index, profile.calls)), changing)


def _crossing(profile: Profile, cluster: Cluster, one: DeviceSlot, other: DeviceSlot, boundary: int) -> float:
    return profile.crossing(cluster.link_between(one, other), boundary)
