"""Decision on a fit's stages, their devices and the number in flight, made at the start of the fit.

If a model was taken apart, hand-overs between user code and stages may cost more than it gains (:func:`without_gain`).
Groups of devices that divide the layers of a stage follow from a plan, from the search, or from the requested shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from lightning_hetpipe.capture.piece_search import TakenApart
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.capture.profiling import ProfilingInput
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.memory import PlannedMemory
from lightning_hetpipe.pipeline.split.member_pool import DeviceGroup
from lightning_hetpipe.placement.device_placement import DevicePlacement
from lightning_hetpipe.planning.model.cluster import DeviceSlot
from lightning_hetpipe.planning.model.estimate import Estimate, StageEstimate
from lightning_hetpipe.planning.model.simulate import StageTimes
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedWorker
from lightning_hetpipe.planning.search.grouped_plans import Parts
from lightning_hetpipe.rules.channel_layouts import ChannelCounts
from lightning_hetpipe.rules.schedule import segments
from lightning_hetpipe.rules.versions import STASH, WeightPolicy

HAND_OVER = 300e-6
"""Seconds that one segment costs beside its computation, forward and backward (``benchmarks/engine_cost.py``)."""

LEAST_GAIN = 0.05
"""Fraction of one stage's throughput that a pipeline must add to be worth its hand-overs."""


@dataclass(frozen=True)
class Decision:
    """Division of layers into stages, their devices, and how many minibatches are in flight.

    Attributes:
        split_points: The first layer of each stage.
        times: Seconds of each stage for one minibatch, forward and backward, or 0 without a measurement.
        names: Names of the stages' devices, if they were declared under names other than torch's.
        emulated: Whether stages take as long as on the devices ``names``, which are not here.
        planned: Memory of each stage. Empty if nothing was planned or devices are emulated.
        groups: Devices of each stage that has several.
        at: Decides anew for another Nm and weight policy. None if another Nm leaves stages unchanged.
    """

    split_points: tuple[int, ...]
    devices: Sequence[torch.device]
    in_flight: int
    times: list[float]
    explanation: Sequence[str] = ()
    names: Sequence[str] | None = None
    emulated: bool = False
    planned: Sequence[PlannedMemory] = ()
    weights: WeightPolicy = STASH
    groups: Mapping[int, DeviceGroup] = field(default_factory=dict)
    at: Callable[[int, WeightPolicy], Decision] | None = field(default=None, repr=False, compare=False)

    def in_groups(self, groups: Mapping[int, DeviceGroup]) -> Decision:
        """Return this decision with ``groups`` of devices for some of its stages."""
        lines = [f"stage {stage} is divided among {group}" for stage, group in groups.items()]
        return replace(self, groups=groups, explanation=[*self.explanation, *lines])


Decide = Callable[[ProfilingInput, Sequence[WeightPolicy]], Decision]
"""Function that decides after the first minibatch has shown the layers, for the first weight policy that fits."""


def without_gain(apart: TakenApart, pieces: Sequence[Piece], decision: Decision) -> str | None:
    """Explain that the pipeline of ``decision`` is hardly faster than one stage.

    Return None if it is much faster, if no module was taken apart, or if there is one stage. Sections of user code
    never run at the same time. Their seconds are estimated from their share of the watched step.
    """
    if not apart or len(decision.times) < 2:
        return None
    computed = sum(decision.times)
    user = computed * (1 - apart.share) / max(apart.share, 1e-3)
    parts = Counter(part.stage for part in segments([len(each.layers) for each in pieces], decision.split_points))
    stages = [seconds + HAND_OVER * parts[stage] for stage, seconds in enumerate(decision.times)]
    pipelined, alone = max(*stages, user + HAND_OVER * parts.total()), computed + user
    if alone >= (1 + LEAST_GAIN) * pipelined:
        return None
    return (
        f"a minibatch is estimated to take {1000 * pipelined:.3g} ms in {len(stages)} stages, with"
        f" {parts.total()} hand-overs between these and user code, and {1000 * alone:.3g} ms in one stage"
    )


def planned_groups(plan: Plan, placement: DevicePlacement) -> dict[int, DeviceGroup]:
    """Return the group of each stage of ``plan`` that has one, on devices that are here."""
    found: dict[int, DeviceGroup] = {}
    slots = placement.cluster.slots_by_place
    for number, stage in enumerate(plan.virtual_workers[0].stages):
        if stage.group:
            places, shares = [member.at for member in stage.group], [member.share for member in stage.group]
            counts = ChannelCounts(shares, {split.layer: split.counts for split in stage.splits})
            found[number] = _group([slots[at] for at in places], counts, placement, places.index(stage.at))
    return found


def chosen_groups(stages: Sequence[StageEstimate], placement: DevicePlacement) -> dict[int, DeviceGroup]:
    """Return the group of each of ``stages`` for which the search chose a group."""
    return {
        number: _group(stage.divided.slots, ChannelCounts(stage.divided.shares, stage.divided.counts), placement)
        for number, stage in enumerate(stages)
        if stage.divided is not None
    }


def shared_groups(
    parts: Parts, split: Mapping[int, Sequence[float]], placement: DevicePlacement
) -> dict[int, DeviceGroup]:
    """Return the group of each stage for which ``split`` has shares, on its devices of ``parts``."""
    return {stage: _group(parts[stage], ChannelCounts(shares), placement) for stage, shares in split.items()}


def _group(
    slots: Sequence[DeviceSlot], counts: ChannelCounts, placement: DevicePlacement, home: int = 0
) -> DeviceGroup:
    devices, names = [placement.device(slot) for slot in slots], [placement.name(slot) for slot in slots]
    return DeviceGroup(devices, counts, home, names)


def parts_of(split: Mapping[int, Sequence[float]], stages: int, placement: DevicePlacement) -> Parts:
    """Give each stage its devices, in order: several devices if ``split`` has shares for the stage.

    A CPU stands for any number of devices, unless devices are declared.

    Raises:
        SettingError: if there are too few devices, or if a group lies on two nodes.
    """
    slots, nodes = placement.cluster.slots, placement.cluster.nodes
    needed = sum(len(split.get(stage, (1,))) for stage in range(stages))
    if placement.devices[0].type == "cpu" and not placement.declared:
        slots = tuple(slots[min(number, len(slots) - 1)] for number in range(needed))
    elif needed > len(slots):
        raise SettingError(
            f"split asks for {needed} devices for {stages} stages, and there are {len(slots)}; give shares for fewer"
            " devices, set stages to fewer, or give more devices"
        )
    parts, start = [], 0
    for stage in range(stages):
        own = slots[start : start + len(split.get(stage, (1,)))]
        start += len(own)
        if len(on := dict.fromkeys(nodes[slot.node].name for slot in own)) > 1:
            raise SettingError(
                f"split[{stage}] takes devices of {' and '.join(on)}, in the order of the cluster, and a group lies on"
                " one machine; give shares for fewer devices, or order the cluster's devices otherwise"
            )
        parts.append(own)
    return tuple(parts)


def as_planned(found: Estimate, worker: PlannedWorker, groups: Collection[int], factor: float) -> Estimate:
    """Use the planned seconds times ``factor`` for stages on ``groups``, of which ``found`` knows one device."""
    stages = list(found.stages)
    for number in groups:
        times, planned = stages[number].times, worker.stages[number].time_s * factor
        ratio = planned / times.total if times.total else 1.0
        own = StageTimes(*(getattr(times, part.name) * ratio for part in fields(times)))
        stages[number] = replace(stages[number], times=own)
    return replace(found, stages=tuple(stages))
