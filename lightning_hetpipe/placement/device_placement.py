"""Device placement and discovery: the devices of one virtual worker, as planning and as torch know them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lightning_hetpipe.accelerator import accelerates, all_devices, free_memory, name_of
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.catalogue import canonical, fragmented
from lightning_hetpipe.planning.model.cluster import LEAST_MEMORY, NO_LINK, PCIE, Cluster, Device, DeviceSlot, Node
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.search.split_points import roomiest

CPU = torch.device("cpu")


def discovered_cluster(devices: Sequence[torch.device] | None = None) -> Cluster:
    """Discover one node with ``devices``, by default all GPUs, or the CPU if there are none.

    A GPU has the catalogue's name, or torch's name if the catalogue does not know it. Its memory is the free bytes for
    tensors of this process, minus a margin for fragmentation. A CPU has no memory limit and no transfers.

    Raises:
        SettingError: if a GPU has almost no free memory.
    """
    if devices is None:
        devices = all_devices() or [CPU]
    link = PCIE if any(map(accelerates, devices)) else NO_LINK
    return Cluster([Node(socket.gethostname() or "here", [_discovered(device) for device in devices], link)])


def _discovered(device: torch.device) -> Device:
    if not accelerates(device):
        return Device(device.type)
    free = free_memory(device)  # without this process's context, and what other processes hold
    name = canonical(name_of(device))
    memory = fragmented(free + torch.accelerator.memory_reserved(device))
    if memory < LEAST_MEMORY:
        raise SettingError(
            f"{device} ({name}) has {in_bytes(free)} free, as other processes hold the rest of its memory; end them, or"
            " leave it out of Trainer(devices=...)"
        )
    return Device(name, memory)


@dataclass(frozen=True)
class DevicePlacement:
    """Devices on which the stages of one virtual worker may lie.

    Attributes:
        cluster: The declared cluster merged with what was found. The catalogue supplies missing memories.
        devices: Torch's device for each of ``cluster.slots``.
        declared: Whether the cluster was declared, so that the user knows its names.
        emulated: Whether the devices are not here, so that stages on a CPU are slowed down to emulate them.
    """

    cluster: Cluster
    devices: Sequence[torch.device]
    declared: bool = False
    emulated: bool = False

    @classmethod
    def of(cls, declared: Cluster | None, devices: Sequence[torch.device], plan: Plan | None = None) -> DevicePlacement:
        """Place stages on ``devices``, which the Trainer was given.

        A CPU stands for any number of devices: the ``declared`` devices, or as many as a ``plan`` has.

        Raises:
            SettingError: if declared accelerators differ from the accelerators that are here.
        """
        on_cpu = all(device.type == "cpu" for device in devices)
        if declared is None:
            if on_cpu and plan is not None:
                stages = [(worker, stage) for worker in plan.virtual_workers for stage in worker.stages]
                here = [stage.members() for worker, stage in stages if stage.node == worker.leader]
                numbers = [each.device_number for members in here for each in members.values()]
                devices = [*devices, *[devices[-1]] * (max(numbers, default=0) + 1 - len(devices))]
            cluster = _named_as_in(plan, discovered_cluster(devices))
            return cls(cluster, [*devices, *[CPU] * (len(cluster.slots) - len(devices))])
        if not on_cpu:
            return cls(_as_measured(declared.over(discovered_cluster(devices))), devices, declared=True)
        emulated = any(slot.device.name != "cpu" or slot.device.speed != 1.0 for slot in declared.slots)
        return cls(declared.with_memory({}), [CPU] * len(declared.slots), declared=True, emulated=emulated)

    def planned(self, plan: Plan) -> list[torch.device]:
        """Return the device of each stage of ``plan``.

        Raises:
            SettingError: if the plan has devices that are not here.
        """
        if found := list(plan.problems(self.cluster)):
            way = "make a plan for these" if self.declared else "plan anew, or give the cluster that it was made for"
            raise SettingError(f"the plan for {plan.model} cannot be run here: {found[0].place} {found[0].said}; {way}")
        return [self.device(slot) for slot in plan.slots(self.cluster)]

    def device(self, slot: DeviceSlot) -> torch.device:
        """Return torch's device for ``slot``."""
        return self.devices[self.cluster.slots.index(slot)]

    def roomiest(self, count: int) -> list[torch.device]:
        """Return the ``count`` devices with the most memory, in their order. Of equal devices, take the first."""
        return [self.devices[index] for index in roomiest([slot.device.memory for slot in self.cluster.slots], count)]

    def room(self, stages: Sequence[torch.device]) -> list[float]:
        """Return the bytes of memory for each of ``stages``, given by devices. Without a limit, numbers are equal."""
        known = self.limits
        if any(device not in known for device in stages):
            return [1.0] * len(stages)
        return [known[device] / stages.count(device) for device in stages]

    @property
    def limits(self) -> dict[torch.device, int]:
        """Bytes of each device that has a limit and is here, as declared or found."""
        found: dict[torch.device, int | None] = {}
        for slot, device in zip(self.cluster.slots, self.devices, strict=True):
            before = found.get(device, 0)
            found[device] = None if before is None or slot.device.memory is None else max(before, slot.device.memory)
        return {} if self.emulated else {device: limit for device, limit in found.items() if limit is not None}

    @property
    def types(self) -> dict[str, torch.device]:
        """One device of each type that is here, by the type's name."""
        if self.emulated:
            return {"cpu": CPU}
        found: dict[str, torch.device] = {}
        for slot, device in zip(self.cluster.slots, self.devices, strict=True):
            if slot.device.speed == 1.0:
                found.setdefault(slot.device.name, device)
        return found

    @property
    def is_even(self) -> bool:
        """True if all devices are of one type. A few MiB less on one device, as for a screen, make no difference."""
        return len({slot.device.name for slot in self.cluster.slots}) == 1

    def name(self, slot: DeviceSlot) -> str:
        """Return the name of the device for tables."""
        where = f"{self.cluster.nodes[slot.node].name} " if len(self.cluster.nodes) > 1 else ""
        return f"{where}{slot}"


def _as_measured(cluster: Cluster) -> Cluster:
    """Make speeds relative to the device that is measured: for each name the first of speed 1, else the first."""
    speeds: dict[str, float] = {}
    for device in (slot.device for slot in cluster.slots):
        speeds[device.name] = 1.0 if device.speed == 1.0 else speeds.get(device.name, device.speed)
    nodes = [
        Node(node.name, [replace(each, speed=each.speed / speeds[each.name]) for each in node.devices], node.link)
        for node in cluster.nodes
    ]
    return Cluster(nodes, cluster.link)


def _named_as_in(plan: Plan | None, found: Cluster) -> Cluster:
    """Name the discovered node as in the plan, since machines may have other names, and add the nodes of hosts."""
    if plan is None:
        return found
    worker, (node,) = plan.virtual_workers[0], found.nodes
    nodes = [Node(worker.leader, node.devices, node.link)]
    for name in worker.nodes:
        if name != worker.leader:
            there = [stage.members().values() for stage in worker.stages if stage.node == name]
            named = {each.device_number: each.device_name for members in there for each in members}
            nodes.append(Node(name, [Device(named.get(number, "cpu")) for number in range(max(named) + 1)]))
    return Cluster(nodes, found.link)
