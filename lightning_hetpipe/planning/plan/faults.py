"""Faults of plans, each with the key in ``plan.json`` at which it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_hetpipe.planning.model.catalogue import canonical
from lightning_hetpipe.planning.model.cluster import Cluster
from lightning_hetpipe.planning.model.units import in_bytes

if TYPE_CHECKING:
    from lightning_hetpipe.planning.plan.device_group import PlannedMember
    from lightning_hetpipe.planning.plan.document import PlannedStage


@dataclass(frozen=True)
class Problem:
    """Fault of a plan.

    Attributes:
        place: The key in ``plan.json``, such as "virtual_workers[0].stages[2].memory_bytes".
        said: Text of the fault.
    """

    place: str
    said: str


def stage_problems(stage: PlannedStage, place: str, next_layer: int, layers: int) -> Iterator[Problem]:
    """Faults of a stage by itself; ``next_layer`` is the one that it must begin with, of ``layers``."""
    if stage.first_layer != next_layer:
        yield Problem(f"{place}.first_layer", f"is {stage.first_layer} and must be {next_layer}: stages leave none out")
    if not stage.first_layer <= stage.last_layer < layers:
        yield Problem(
            f"{place}.last_layer", f"is {stage.last_layer} and must be from {stage.first_layer} to {layers - 1}"
        )
    limit = stage.memory_limit_bytes
    if limit is not None and stage.memory_bytes > limit:
        yield Problem(
            f"{place}.memory_bytes",
            f"is {in_bytes(stage.memory_bytes)}, {in_bytes(stage.memory_bytes - limit)} more than {stage.place} has",
        )
    if stage.device_number is None:
        yield Problem(f"{place}.device", f"is '{stage.device}' and must be a name and a number, such as 'RTX-3090:0'")


def place_problems(stage: PlannedStage | PlannedMember, place: str, cluster: Cluster) -> Iterator[Problem]:
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
    elif number is not None and (limit := node.devices[number].memory) is not None and stage.memory_bytes > limit:
        said = f"is {in_bytes(stage.memory_bytes)}, {in_bytes(stage.memory_bytes - limit)} more than {stage.place} has"
        yield Problem(f"{place}.memory_bytes", said)


def shared_problems(stages: Mapping[str, PlannedStage], cluster: Cluster | None) -> Iterator[Problem]:
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
