"""Groups of devices that divide the layers of a stage, by a plan or by the requested shares."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.split.member_pool import DeviceGroup
from lightning_hetpipe.placement.device_placement import DevicePlacement
from lightning_hetpipe.planning.model.cluster import DeviceSlot
from lightning_hetpipe.planning.model.estimate import Estimate, StageEstimate
from lightning_hetpipe.planning.model.simulate import StageTimes
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedWorker
from lightning_hetpipe.planning.search.grouped_plans import Parts
from lightning_hetpipe.rules.channel_layouts import ChannelCounts


def planned_groups(plan: Plan, placement: DevicePlacement) -> dict[int, DeviceGroup]:
    """Return the group of each stage of ``plan`` that has one, on devices that are here."""
    found: dict[int, DeviceGroup] = {}
    stages = plan.virtual_workers[0].stages
    for number, (stage, slots) in enumerate(zip(stages, plan.groups(0, placement.cluster), strict=True)):
        if slots:
            counts = ChannelCounts(
                [member.share for member in stage.group], {split.layer: split.counts for split in stage.splits}
            )
            home = [member.at for member in stage.group].index(stage.at)
            found[number] = _group(slots, counts, placement, home)
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
        SettingError: if a stage does not exist, if there are too few devices, or if a group lies on two nodes.
    """
    slots, nodes = placement.cluster.slots, placement.cluster.nodes
    if (last := max(split)) >= stages:
        raise SettingError(
            f"split has shares for stage {last}, and there are {stages} stages, from 0 on; set stages to more, or leave"
            " it out of split"
        )
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
