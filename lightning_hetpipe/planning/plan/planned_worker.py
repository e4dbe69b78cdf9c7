"""Virtual workers of a plan, their stages and groups of devices: made from estimates, or read from ``plan.json``.

A record yields its faults, each with its key in ``plan.json``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Annotated

from lightning_hetpipe.planning.model.catalogue import canonical
from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.model.profile import Bytes, Layer, Seconds
from lightning_hetpipe.rules.channel_layouts import is_share
from lightning_hetpipe.settings import Bounds, CheckedRecord, Length, Size

ESTIMATED = " (estimated)"
NOMINAL = " (nominal memory)"
_DEVICE = re.compile(rf"(?P<name>.+):(?P<number>\d+)(?:{re.escape(ESTIMATED)}|{re.escape(NOMINAL)})?", re.DOTALL)


Label = Annotated[str, _DEVICE.fullmatch, "a name and a number, such as 'RTX-3090:0'"]


@dataclass(frozen=True)
class Problem:
    """Fault of a plan: the text ``said``, and its ``place``, such as "virtual_workers[0].stages[2].memory_bytes"."""

    place: str
    said: str


class DeviceLabel(CheckedRecord):
    """Record with a ``device`` such as "RTX-3090:1": a name, and the device's number on its node."""

    node: str
    device: str

    @property
    def device_name(self) -> str:
        """Device name without the number."""
        return self.place.rpartition(":")[0]

    @property
    def device_number(self) -> int:
        """Number of the device on its node, from 0."""
        return int(self.place.rpartition(":")[2])

    @property
    def at(self) -> tuple[str, int]:
        """The node, and the device's number on it."""
        return self.node, self.device_number

    @property
    def place(self) -> str:
        """Device name and number, such as "RTX-3090:1"."""
        return self.device.removesuffix(ESTIMATED).removesuffix(NOMINAL)

    @property
    def estimated(self) -> bool:
        """True if the device's times come from a data sheet."""
        return self.device.endswith(ESTIMATED)

    @property
    def nominal(self) -> bool:
        """True if only the device's memory comes from a data sheet."""
        return self.device.endswith(NOMINAL)

    def problems_on(self, cluster: Cluster, place: str) -> Iterator[Problem]:
        """Yield the fault that ``cluster`` has no such device. ``place`` is the key of this record."""
        node = next((node for node in cluster.nodes if node.name == self.node), None)
        if node is None:
            there = ", ".join(node.name for node in cluster.nodes)
            yield Problem(f"{place}.node", f"is '{self.node}'; there are {there}")
            return
        number = self.device_number
        if number >= len(node.devices):
            yield Problem(f"{place}.device", f"is '{self.device}', and {self.node} has {len(node.devices)}, from 0 on")
        elif canonical(node.devices[number].name) != canonical(self.device_name):
            yield Problem(f"{place}.device", f"is '{self.device}', where {self.node} has a {node.devices[number].name}")


@dataclass(frozen=True)
class PlannedMember(DeviceLabel):
    """One device of a stage's group, on the stage's node.

    Attributes:
        share: Part of the work, relative to the other members' shares.
        memory_bytes: Bytes that it takes, or 0 without an estimate.
        memory_limit_bytes: Bytes of the device, or None if memory is no limit.
    """

    node: str
    device: Label
    share: Annotated[float, is_share, "a number, 0 or more, and finite"]
    memory_bytes: Bytes = 0
    memory_limit_bytes: Size | None = None


@dataclass(frozen=True)
class PlannedSplit(CheckedRecord):
    """One layer that a group divides.

    Attributes:
        layer: Path of the module in the LightningModule, such as "net.features.0". For a parameter that is no module's
            ``weight``, the parameter's own path.
        counts: Number of units for each member, in the group's order: output channels, groups of a grouped convolution,
            or attention heads. If several heads of queries share a head of keys and values, the latter count.
    """

    layer: str
    counts: tuple[Annotated[int, Bounds(0)], ...]


@dataclass(frozen=True)
class PlannedStage(DeviceLabel):
    """One stage of a plan.

    Attributes:
        node: Name of the machine.
        device: Name and number on the node, such as "RTX-3090:1". " (estimated)" follows if the times come from a data
            sheet, " (nominal memory)" if only the memory does.
        first_layer, last_layer: Indices in the plan's ``layers``, both inclusive.
        time_s: Seconds for one minibatch, forward and backward with transfers.
        memory_bytes: Bytes that the stage takes.
        memory_limit_bytes: Bytes of the device, or None if memory is no limit.
        weights_bytes: Bytes of its weights, by which a spread run divides the model. 0 if a file does not have it.
        group: Devices that divide the layers, in order. The stage's own device is among them and holds the unsplit
            weights, gradients and optimizer state. Empty for a stage on one device.
        splits: Layers that the group divides by output channels. If empty, it divides every layer it can, by the
            members' shares.
    """

    node: str
    device: Label
    first_layer: Layer
    last_layer: Layer
    time_s: Seconds
    memory_bytes: Bytes
    memory_limit_bytes: Size | None
    weights_bytes: Bytes = 0
    group: tuple[PlannedMember, ...] = ()
    splits: tuple[PlannedSplit, ...] = ()

    def members(self, place: str = "") -> dict[str, PlannedStage | PlannedMember]:
        """Return the stage's devices, its own first, by their keys in ``plan.json`` behind ``place``."""
        others = {f"{place}.group[{number}]": each for number, each in enumerate(self.group)}
        return {place: self, **{key: each for key, each in others.items() if each.at != self.at}}

    def problems(self, place: str, next_layer: int, layers: int) -> Iterator[Problem]:
        """Yield faults of the stage by itself, which must begin with ``next_layer`` and end within ``layers``.

        ``place`` is the key of the stage.
        """
        first, last, group = self.first_layer, self.last_layer, self.group
        if first != next_layer:
            yield Problem(f"{place}.first_layer", f"is {first} and must be {next_layer}: stages leave none out")
        if not first <= last < layers:
            yield Problem(f"{place}.last_layer", f"is {last} and must be from {first} to {layers - 1}")
        if self.splits and not group:
            said = "divides layers, and the stage has no group; give it one, or leave splits out"
            yield Problem(f"{place}.splits", said)
        if not group:
            return
        if len(group) == 1:
            yield Problem(f"{place}.group", "has one member; leave it out for a stage on one device")
        if self.at not in [member.at for member in group]:
            said = f"is '{self.place}', which holds the unsplit weights and must be in the group"
            yield Problem(f"{place}.device", said)
        if not any(member.share > 0 for member in group):
            yield Problem(f"{place}.group", "has no share above 0; give at least one member some of the work")
        for number, member in enumerate(group):
            key = f"{place}.group[{number}]"
            if member.at in [each.at for each in group[:number]]:
                yield Problem(f"{key}.device", f"is '{member.place}', which is in the group already")
            if member.node != self.node:
                said = f"is '{member.node}', and a group lies on one machine, here '{self.node}'"
                yield Problem(f"{key}.node", said)
        for number, split in enumerate(self.splits):
            key = f"{place}.splits[{number}]"
            if len(split.counts) != len(group):
                said = f"has {len(split.counts)} numbers for '{split.layer}', and the group {len(group)} members"
                yield Problem(f"{key}.counts", said)
            elif not sum(split.counts):
                yield Problem(f"{key}.counts", f"gives nobody anything of '{split.layer}'")
            if split.layer in [each.layer for each in self.splits[:number]]:
                yield Problem(f"{key}.layer", f"is '{split.layer}', which is divided already")


@dataclass(frozen=True)
class PlannedWorker(CheckedRecord):
    """A virtual worker. ``wave`` is W_v, or None for the plan's W. ``minibatches_per_second`` is its simulated part
    of the total rate. ``stages`` are in the order of layers."""

    minibatches_per_second: Annotated[float, Bounds(0)]
    stages: Annotated[tuple[PlannedStage, ...], Length(1), "a list of at least one stage"]
    wave: Size | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The machines of its stages."""
        return tuple(dict.fromkeys(stage.node for stage in self.stages))

    @property
    def leader(self) -> str:
        """The machine of its last stage, on which user code runs."""
        return self.stages[-1].node

    @classmethod
    def of(
        cls,
        found: Estimate,
        rate: float,
        wave: int | None,
        cluster: Cluster,
        estimated: Collection[str],
        nominal: Collection[DeviceSlot],
    ) -> PlannedWorker:
        """Make the virtual worker of an estimate with ``rate`` minibatches per second. For the rest see ``Plan.of``."""

        def at(slot: DeviceSlot) -> tuple[str, str]:
            """Return the names of the node and of the device."""
            mark = ESTIMATED if slot.device.name in estimated else NOMINAL if slot in nominal else ""
            return cluster.nodes[slot.node].name, f"{slot}{mark}"

        stages = []
        for stage in found.stages:
            members, splits = list[PlannedMember](), list[PlannedSplit]()
            if (divided := stage.divided) is not None:
                parts = zip(divided.slots, divided.shares, divided.taken, strict=True)
                members = [PlannedMember(*at(slot), share, taken, slot.device.memory) for slot, share, taken in parts]
                splits = [PlannedSplit(*each) for each in divided.counts.items()]
            planned = PlannedStage(
                *at(stage.slot),
                first_layer=stage.first,
                last_layer=stage.last,
                time_s=stage.times.total,
                memory_bytes=stage.memory.total,
                memory_limit_bytes=stage.limit,
                weights_bytes=stage.memory.weights,
                group=tuple(members),
                splits=tuple(splits),
            )
            stages.append(planned)
        return cls(rate, tuple(stages), wave)
