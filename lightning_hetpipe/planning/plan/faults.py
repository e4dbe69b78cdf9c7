"""Faults of plans, each with its key in ``plan.json``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_hetpipe.planning.model.catalogue import canonical
from lightning_hetpipe.planning.model.cluster import Cluster
from lightning_hetpipe.planning.model.units import in_bytes

if TYPE_CHECKING:
    from lightning_hetpipe.planning.plan.document import Plan
    from lightning_hetpipe.planning.plan.planned_worker import PlannedMember, PlannedSplit, PlannedStage


@dataclass(frozen=True)
class Problem:
    """Fault of a plan: the text ``said``, and its ``place``, such as "virtual_workers[0].stages[2].memory_bytes"."""

    place: str
    said: str


def plan_problems(plan: Plan, cluster: Cluster | None) -> Iterator[Problem]:
    """Yield the faults that keep ``plan`` from running on any devices, and on the devices of ``cluster``."""
    taken: dict[tuple[str, int], tuple[int, bool]] = {}
    at: dict[tuple[str, int], dict[str, PlannedStage | PlannedMember]] = {}
    for index, worker in enumerate(plan.virtual_workers):
        stages = f"virtual_workers[{index}].stages"
        next_layer = 0
        for number, stage in enumerate(worker.stages):
            yield from _stage_problems(stage, f"{stages}[{number}]", next_layer, len(plan.layers))
            next_layer = stage.last_layer + 1
            yield from _group_problems(stage, f"{stages}[{number}]")
            for key, each in stage.members(f"{stages}[{number}]").items():
                at.setdefault(each.at, {})[key] = each
                is_last = number + 1 == len(worker.stages)
                other, shares = taken.setdefault(each.at, (index, is_last))
                if other != index and not (shares and is_last):
                    said = f"is '{each.place}', which is virtual worker {other}'s, too, and only last stages"
                    yield Problem(f"{key}.device", f"{said} share a device")
                if cluster is not None:
                    yield from _place_problems(each, key, cluster)
        if next_layer != len(plan.layers):
            yield Problem(
                f"{stages}[{len(worker.stages) - 1}].last_layer",
                f"is {next_layer - 1}, and the model's last layer is {len(plan.layers) - 1}",
            )

    slots = {} if cluster is None else cluster.slots_by_place
    for place, on_device in at.items():
        yield from _memory_problems(on_device, slots[place].device.memory if place in slots else None)


def _stage_problems(stage: PlannedStage, place: str, next_layer: int, layers: int) -> Iterator[Problem]:
    """Yield faults of a stage by itself, which must begin with ``next_layer`` and end within ``layers``."""
    if stage.first_layer != next_layer:
        yield Problem(f"{place}.first_layer", f"is {stage.first_layer} and must be {next_layer}: stages leave none out")
    if not stage.first_layer <= stage.last_layer < layers:
        yield Problem(
            f"{place}.last_layer", f"is {stage.last_layer} and must be from {stage.first_layer} to {layers - 1}"
        )


def _group_problems(stage: PlannedStage, place: str) -> Iterator[Problem]:
    group = stage.group
    if stage.splits and not group:
        yield Problem(f"{place}.splits", "divides layers, and the stage has no group; give it one, or leave splits out")
    if not group:
        return
    if len(group) == 1:
        yield Problem(f"{place}.group", "has one member; leave it out for a stage on one device")
    if stage.at not in [member.at for member in group]:
        yield Problem(
            f"{place}.device", f"is '{stage.place}', which holds the unsplit weights and must be in the group"
        )
    if not any(member.share > 0 for member in group):
        yield Problem(f"{place}.group", "has no share above 0; give at least one member some of the work")
    for number in range(len(group)):
        yield from _member_problems(stage, number, f"{place}.group[{number}]")
    for number, split in enumerate(stage.splits):
        yield from _split_problems(stage.splits[:number], split, len(group), f"{place}.splits[{number}]")


def _member_problems(stage: PlannedStage, number: int, place: str) -> Iterator[Problem]:
    member = stage.group[number]
    if member.at in [each.at for each in stage.group[:number]]:
        yield Problem(f"{place}.device", f"is '{member.place}', which is in the group already")
    if member.node != stage.node:
        yield Problem(f"{place}.node", f"is '{member.node}', and a group lies on one machine, here '{stage.node}'")


def _split_problems(before: Sequence[PlannedSplit], split: PlannedSplit, members: int, place: str) -> Iterator[Problem]:
    if len(split.counts) != members:
        yield Problem(
            f"{place}.counts", f"has {len(split.counts)} numbers for '{split.layer}', and the group {members} members"
        )
    elif not sum(split.counts):
        yield Problem(f"{place}.counts", f"gives nobody anything of '{split.layer}'")
    if split.layer in [each.layer for each in before]:
        yield Problem(f"{place}.layer", f"is '{split.layer}', which is divided already")


def _place_problems(stage: PlannedStage | PlannedMember, place: str, cluster: Cluster) -> Iterator[Problem]:
    node = next((node for node in cluster.nodes if node.name == stage.node), None)
    if node is None:
        yield Problem(f"{place}.node", f"is '{stage.node}'; there are {', '.join(node.name for node in cluster.nodes)}")
        return
    number = stage.device_number
    if number >= len(node.devices):
        yield Problem(f"{place}.device", f"is '{stage.device}', and {stage.node} has {len(node.devices)}, from 0 on")
    elif canonical(node.devices[number].name) != canonical(stage.device_name):
        yield Problem(f"{place}.device", f"is '{stage.device}', where {stage.node} has a {node.devices[number].name}")


def _memory_problems(on_device: Mapping[str, PlannedStage | PlannedMember], memory: int | None) -> Iterator[Problem]:
    """Yield faults of stages, by their keys, that take too much of one device's ``memory``, alone or together."""
    every = [*on_device.values()]
    limits = [limit for limit in (*(each.memory_limit_bytes for each in every), memory) if limit is not None]
    limit, taken = min(limits, default=math.inf), sum(each.memory_bytes for each in every)
    too_large = {key: each.memory_bytes for key, each in on_device.items() if each.memory_bytes > limit}
    for key, size in too_large.items():
        said = f"is {in_bytes(size)}, {in_bytes(size - limit)} more than {every[0].place} has"
        yield Problem(f"{key}.memory_bytes", said)
    if not too_large and taken > limit:
        together = f"{in_bytes(taken)} with what else lies on {every[0].place}"
        said = f"makes {together}, {in_bytes(taken - limit)} more than it has"
        yield Problem(f"{[*on_device][-1]}.memory_bytes", said)
