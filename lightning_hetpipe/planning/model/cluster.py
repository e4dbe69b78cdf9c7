"""Cluster: devices, the nodes that hold them, and the links between them, discovered, declared, or both."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Annotated

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.catalogue import canonical, known
from lightning_hetpipe.planning.model.units import bandwidth_of, bytes_of, in_bandwidth, in_seconds, seconds_of
from lightning_hetpipe.settings import Bounds, Length, Reads, is_positive, take

LEAST_MEMORY = 1 << 20
"""Smallest memory of a device in bytes. A smaller number is taken for a number without its unit."""

MOST_DEVICES = 10_000
"""Largest number of devices that one text, such as "8xT4", may stand for."""

_SEVERAL = re.compile(r"(\d+)[x*](?=[A-Za-z])(.+)")


def _is_whole(value: float) -> bool:
    return isinstance(value, int)


def _memory(given: float | str, setting: str) -> float:
    memory = bytes_of(given, setting)
    if 0 < memory < LEAST_MEMORY:
        meant = f"{memory:g} {'GiB' if memory < 1000 else 'MiB'}"
        raise SettingError(f"{setting}={given!r} is {memory:g} bytes; did you mean '{meant}'?")
    return memory


Memory = Annotated[
    float | str, Reads(_memory), is_positive, _is_whole, "positive: a whole number of bytes, or as '24 GiB'"
]
Bandwidth = Annotated[
    float | str, Reads(bandwidth_of), is_positive, "a positive number of bytes per second, or as '12 GB/s'"
]
Latency = Annotated[float | str, Reads(seconds_of), Bounds(0), "a number of seconds, at least 0, or as '10 us'"]


@dataclass(frozen=True, init=False)
class Device:
    """One device.

    Args:
        name: Type of the device, such as "RTX-3090". A profile has layer times by this name.
        memory: Bytes, or text such as "24 GiB". If None, the profile or the catalogue of GPUs supplies it.
        speed: Speed relative to the device of the profile's times: 2 is twice as fast.

    Raises:
        SettingError: if memory or speed is not positive.
    """

    name: str
    memory: int | None
    speed: float

    def __init__(
        self,
        name: Annotated[str, bool, "a name, such as 'RTX-3090'"],
        memory: Memory | None = None,
        speed: Annotated[float, Bounds(0), is_positive, "a positive number"] = 1.0,
    ) -> None:
        take(self, locals())


@dataclass(frozen=True, init=False)
class Link:
    """Link between devices.

    Args:
        bandwidth: Bytes/s, or text such as "12 GB/s" or "200 Mbit/s".
        latency: Seconds, or text such as "10 us".

    Raises:
        SettingError: if the bandwidth is not positive, or the latency is negative.
    """

    bandwidth: float
    latency: float

    def __init__(self, bandwidth: Bandwidth, latency: Latency = 0.0) -> None:
        take(self, locals())

    def __str__(self) -> str:
        """Text such as "12 GB/s", or with a latency "12 GB/s with 0.01 ms latency"."""
        speed = in_bandwidth(self.bandwidth)
        return f"{speed} with {in_seconds(self.latency)} latency" if self.latency else speed

    def seconds(self, nbytes: int) -> float:
        """Return the seconds that a transfer of ``nbytes`` takes. A transfer of zero bytes takes no time."""
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0


NO_LINK = Link(math.inf)
"""Link within shared memory, over which nothing has to travel."""

PCIE = Link("12 GB/s", "10 us")
"""Link that is assumed between devices of one machine if none is declared: PCIe 3.0 x16 in practice."""

ETHERNET = Link("10 Gbit/s", "50 us")
"""Link that is assumed between machines if none is declared."""


@dataclass(frozen=True)
class DeviceSlot:
    """Place in a cluster: ``device`` is number ``number`` of node ``node``."""

    node: int
    number: int
    device: Device

    def __str__(self) -> str:
        return f"{self.device.name}:{self.number}"


def _link(given: Link | str, setting: str) -> Link:
    return given if isinstance(given, Link) else Link(bandwidth_of(given, setting))


def _devices(given: Sequence[Device | str], _: str) -> tuple[Device, ...]:
    found: list[Device] = []
    for each in given:
        match = _SEVERAL.fullmatch(each) if isinstance(each, str) else None
        if match is not None and not 1 <= int(match[1][:9]) <= MOST_DEVICES:
            raise SettingError(f"{each!r} must stand for 1 to {MOST_DEVICES} devices; give another number")
        name = each if match is None else match[2]
        found += [Device(name) if isinstance(name, str) else name] * (1 if match is None else int(match[1]))
    return tuple(found)


LinkGiven = Annotated[Link | str, Reads(_link), "a Link, or a bandwidth such as '12 GB/s'"]
Devices = Annotated[
    Sequence[Annotated[Device | str, "a Device, or its name, such as 'RTX-3090'"]],
    Length(1),
    Reads(_devices),
    "a list of at least one Device, or its name",
]


@dataclass(frozen=True, init=False)
class Node:
    """A machine.

    Args:
        name: Name, unique in the cluster.
        devices: Devices in order. A name alone stands for a ``Device`` of that name, "2xRTX-3090" for two, and a
            mapping for a device with these arguments.
        link: Link between any two of the devices. Text is a bandwidth, such as "12 GB/s", and a mapping gives the
            arguments of ``Link``. If None, :data:`PCIE` is assumed, or :data:`NO_LINK` between CPUs.

    Raises:
        SettingError: if there are no devices.
    """

    name: str
    devices: tuple[Device, ...]
    link: Link | None

    def __init__(
        self, name: Annotated[str, bool, "a name, such as 'box'"], devices: Devices, link: LinkGiven | None = None
    ) -> None:
        take(self, locals())

    @property
    def own_link(self) -> Link:
        """Link between any two devices of this node, declared or assumed."""
        if self.link is not None:
            return self.link
        return NO_LINK if all(device.name == "cpu" for device in self.devices) else PCIE


@dataclass(frozen=True, init=False)
class Cluster:
    """Machines and the link between them.

    Args:
        nodes: Nodes in order, each a ``Node`` or a mapping with its arguments.
        link: Link between any two nodes. Text is a bandwidth, such as "10 Gbit/s", and a mapping gives the arguments of
            ``Link``. If None, :data:`ETHERNET` is assumed.

    Raises:
        SettingError: if there are no nodes, or if two nodes have one name.
    """

    nodes: tuple[Node, ...]
    link: Link | None

    def __init__(
        self, nodes: Annotated[Sequence[Node], Length(1), "a list of at least one Node"], link: LinkGiven | None = None
    ) -> None:
        take(self, locals())
        object.__setattr__(self, "nodes", tuple(self.nodes))
        names = [node.name for node in self.nodes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise SettingError(f"two nodes of the Cluster are named '{twice[0]}'; give each a name of its own")

    @property
    def slots_by_node(self) -> tuple[tuple[DeviceSlot, ...], ...]:
        """The devices of each node."""
        nodes = enumerate(self.nodes)
        return tuple(tuple(DeviceSlot(n, d, device) for d, device in enumerate(node.devices)) for n, node in nodes)

    @property
    def slots(self) -> tuple[DeviceSlot, ...]:
        """All devices, node by node."""
        return tuple(chain(*self.slots_by_node))

    @property
    def slots_by_place(self) -> dict[tuple[str, int], DeviceSlot]:
        """All devices by node name and number in the node, which is how plans name a device."""
        return {(self.nodes[slot.node].name, slot.number): slot for slot in self.slots}

    @property
    def between(self) -> Link:
        """Link between any two nodes, declared or assumed."""
        return self.link or ETHERNET

    def link_between(self, one: DeviceSlot, other: DeviceSlot) -> Link:
        """Return the link over which a value travels from ``one`` to ``other``."""
        if one.node != other.node:
            return self.between
        return NO_LINK if one.number == other.number else self.nodes[one.node].own_link

    def assumed(self, slots: Iterable[DeviceSlot]) -> list[str]:
        """Return a sentence for each undeclared link that stages on ``slots``, in this order, use."""
        found: dict[str, None] = {}
        for one, other in pairwise(slots):
            node = self.nodes[one.node]
            if one.node != other.node and self.link is None:
                found[f"{ETHERNET} is assumed between nodes, as the cluster declares no link"] = None
            elif one.node == other.node and node.link is None and self.link_between(one, other) != NO_LINK:
                found[f"{node.own_link} is assumed between devices of '{node.name}', as it declares no link"] = None
        return [*found]

    def with_memory(self, bytes_by_name: Mapping[str, int], catalogue: bool = True) -> Cluster:
        """Fill in missing memories of devices from ``bytes_by_name``, then from the ``catalogue``, or set no limit."""
        known_bytes = {canonical(name): nbytes for name, nbytes in bytes_by_name.items()}

        def filled(device: Device) -> Device:
            if device.memory is not None:
                return device
            name, gpu = canonical(device.name), known(device.name) if catalogue else None
            return replace(device, memory=known_bytes.get(name, None if gpu is None else gpu.usable))

        return Cluster([Node(node.name, [*map(filled, node.devices)], node.link) for node in self.nodes], self.link)

    def of_nodes(self, names: Collection[str]) -> Cluster:
        """Return the cluster of the nodes in ``names`` alone. If none of them is in this cluster, return all nodes."""
        return Cluster([node for node in self.nodes if node.name in names] or self.nodes, self.link)

    def over(self, found: Cluster) -> Cluster:
        """Merge this declaration with the machines of ``found``, which supply whatever the declaration leaves open.

        Nodes and devices are matched by their order. A device gets at most the memory that was found.

        Raises:
            SettingError: if the numbers of nodes or devices differ, or if two matched GPUs of the catalogue differ.
        """
        if len(self.nodes) != len(found.nodes):
            raise SettingError(
                f"the cluster declares {_count(self.nodes, 'node')}, and {len(found.nodes)} are there; declare each"
                " node of the run"
            )
        nodes = []
        for node, there in zip(self.nodes, found.nodes, strict=True):
            if len(node.devices) != len(there.devices):
                raise SettingError(
                    f"the cluster's node '{node.name}' declares {_count(node.devices, 'device')}, and"
                    f" {len(there.devices)} are there ({', '.join(device.name for device in there.devices)}); declare"
                    " each device of the run, or choose devices by Trainer(devices=...)"
                )
            devices = []
            for number, (one, other) in enumerate(zip(node.devices, there.devices, strict=True)):
                if known(one.name) and known(other.name) and canonical(one.name) != canonical(other.name):
                    raise SettingError(
                        f"the cluster's node '{node.name}' declares '{one.name}' as device {number}, where"
                        f" '{other.name}' is there ({', '.join(device.name for device in there.devices)}); declare"
                        " devices in the order in which they are found"
                    )
                memory = [each.memory for each in (one, other) if each.memory is not None]
                devices.append(replace(one, memory=min(memory, default=None)))
            nodes.append(Node(node.name, devices, there.link if node.link is None else node.link))
        return Cluster(nodes, found.link if self.link is None else self.link)


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"
