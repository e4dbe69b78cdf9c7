"""Faults of plans, each with the key in ``plan.json`` at which it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_hetpipe.planning.model.catalogue import canonical
from lightning_hetpipe.planning.model.cluster import Cluster
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.rules.channel_layouts import is_share
from lightning_hetpipe.rules.parameter_placement import PLACEMENTS
from lightning_hetpipe.rules.versions import POLICIES

if TYPE_CHECKING:
    from lightning_hetpipe.planning.plan.document import Plan
    from lightning_hetpipe.planning.plan.planned_worker import PlannedMember, PlannedSplit, PlannedStage


@dataclass(frozen=True)
class Problem:
    """Fault of a plan.

    Attributes:
        place: The key in ``plan.json``, such as "virtual_workers[0].stages[2].memory_bytes".
        said: Text of the fault.
    """

    place: str
    said: str


def plan_problems(plan: Plan, cluster: Cluster | None) -> Iterator[Problem]:
    """Faults that keep ``plan`` from running: on any devices, and on those of ``cluster``."""
    if plan.weights not in POLICIES:
        yield Problem("weights", f"is '{plan.weights}' and must be one of {', '.join(POLICIES)}")
    if plan.placement not in PLACEMENTS:
        yield Problem("placement", f"is '{plan.placement}' and must be one of {', '.join(PLACEMENTS)}")
    if not plan.virtual_workers:
        yield Problem("virtual_workers", "is empty; a plan has at least one")
    taken: dict[tuple[str, int], tuple[int, bool]] = {}
    for index, worker in enumerate(plan.virtual_workers):
        place = f"virtual_workers[{index}].stages"
        if not worker.stages:
            yield Problem(place, "is empty; a virtual worker has at least one stage")
        next_layer = 0
        for number, stage in enumerate(worker.stages):
            yield from _stage_problems(stage, f"{place}[{number}]", next_layer, len(plan.layers))
            next_layer = stage.last_layer + 1
            yield from _group_problems(stage, f"{place}[{number}]")
            for key, each in stage.members(f"{place}[{number}]").items():
                if (at := each.device_number) is not None:
                    is_last = number + 1 == len(worker.stages)
                    other, shares = taken.setdefault((each.node, at), (index, is_last))
                    if other != index and not (shares and is_last):
                        said = f"is '{each.place}', which is virtual worker {other}'s, too, and only last stages"
                        yield Problem(f"{key}.device", f"{said} share a device")
                if cluster is not None:
                    yield from _place_problems(each, key, cluster)
        if worker.stages and next_layer != len(plan.layers):
            yield Problem(
                f"{place}[{len(worker.stages) - 1}].last_layer",
                f"is {next_layer - 1}, and the model's last layer is {len(plan.layers) - 1}",
            )

    stages = {
        f"virtual_workers[{index}].stages[{number}]": stage
        for index, worker in enumerate(plan.virtual_workers)
        for number, stage in enumerate(worker.stages)
    }
    yield from _shared_problems(stages, cluster)


def _stage_problems(stage: PlannedStage, place: str, next_layer: int, layers: int) -> Iterator[Problem]:
    """Faults of a stage by itself; ``next_layer`` is the one that it must begin with, of ``layers``."""
    if stage.first_layer != next_layer:
        yield Problem(f"{place}.first_layer", f"is {stage.first_layer} and must be {next_layer}: stages leave none out")
    if not stage.first_layer <= stage.last_layer < layers:
        yield Problem(
            f"{place}.last_layer", f"is {stage.last_layer} and must be from {stage.first_layer} to {layers - 1}"
        )
    yield from _memory_problems(stage, place, stage.memory_limit_bytes)
    if stage.device_number is None:
        yield Problem(f"{place}.device", f"is '{stage.device}' and must be a name and a number, such as 'RTX-3090:0'")


def _group_problems(stage: PlannedStage, place: str) -> Iterator[Problem]:
    """Faults of a stage's group by itself."""
    group = stage.group
    if stage.splits and not group:
        yield Problem(f"{place}.splits", "divides layers, and the stage has no group; give it one, or leave splits out")
    if not group:
        return
    places = [(member.node, member.device_number) for member in group]
    if len(group) == 1:
        yield Problem(f"{place}.group", "has one member; leave it out for a stage on one device")
    if (stage.node, stage.device_number) not in places:
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
    at = member.node, member.device_number
    if at[1] is None:
        yield Problem(f"{place}.device", f"is '{member.device}' and must be a name and a number, such as 'RTX-3090:0'")
    elif at in [(each.node, each.device_number) for each in stage.group[:number]]:
        yield Problem(f"{place}.device", f"is '{member.place}', which is in the group already")
    if not is_share(member.share):
        yield Problem(f"{place}.share", f"is {member.share} and must be 0 or more, and finite")
    if member.node != stage.node:
        yield Problem(f"{place}.node", f"is '{member.node}', and a group lies on one machine, here '{stage.node}'")
    yield from _memory_problems(member, place, member.memory_limit_bytes)


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
    """Faults of a stage's device in ``cluster``."""
    node = next((node for node in cluster.nodes if node.name == stage.node), None)
    if node is None:
        yield Problem(f"{place}.node", f"is '{stage.node}'; there are {', '.join(node.name for node in cluster.nodes)}")
        return
    number = stage.device_number
    if number is not None and number >= len(node.devices):
        yield Problem(f"{place}.device", f"is '{stage.device}', and {stage.node} has {len(node.devices)}, from 0 on")
    elif number is not None and canonical(node.devices[number].name) != canonical(stage.device_name):
        yield Problem(f"{place}.device", f"is '{stage.device}', where {stage.node} has a {node.devices[number].name}")
    elif number is not None:
        yield from _memory_problems(stage, place, node.devices[number].memory)


def _memory_problems(each: PlannedStage | PlannedMember, place: str, limit: int | None) -> Iterator[Problem]:
    """Faults of what a device takes; ``limit`` is what it has, or None for no limit."""
    if limit is not None and each.memory_bytes > limit:
        said = f"is {in_bytes(each.memory_bytes)}, {in_bytes(each.memory_bytes - limit)} more than {each.place} has"
        yield Problem(f"{place}.memory_bytes", said)


def _shared_problems(stages: Mapping[str, PlannedStage], cluster: Cluster | None) -> Iterator[Problem]:
    """Faults of devices that several of ``stages``, by their keys, share, each of which would fit there alone."""
    shared: dict[tuple[str, int], list[str]] = {}
    for place, stage in stages.items():
        if (at := stage.device_number) is not None:
            shared.setdefault((stage.node, at), []).append(place)
    for places in shared.values():
        limit = _limit([stages[place] for place in places], cluster)
        taken = [stages[place].memory_bytes for place in places]
        if limit is not None and max(taken) <= limit < sum(taken):
            together = f"{in_bytes(sum(taken))} with what else lies on {stages[places[0]].place}"
            said = f"makes {together}, {in_bytes(sum(taken) - limit)} more than it has"
            yield Problem(f"{places[-1]}.memory_bytes", said)


def _limit(stages: Sequence[PlannedStage], cluster: Cluster | None) -> int | None:
    """Bytes of the one device of ``stages``, as they say and as ``cluster`` does; None for no limit."""
    found = [stage.memory_limit_bytes for stage in stages]
    for node in () if cluster is None else cluster.nodes:
        found += (
            device.memory
            for number, device in enumerate(node.devices)
            if any((stage.node, stage.device_number) == (node.name, number) for stage in stages)
        )
    return min((each for each in found if each is not None), default=None)
