"""The devices that there are, and what connects them: found, declared, or both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_hetpipe.errors import SettingError


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: What it is, such as "RTX-3090": devices of one name are of one type. A profile has times by it.
        memory: Bytes that it has; None where that is no limit.
        speed: How many times faster than what the profile's times are of.

    Raises:
        SettingError: for numbers that no device has.
    """

    name: str
    memory: int | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise SettingError(f"Device(name={self.name!r}) must be a name, such as 'RTX-3090'")
        if self.memory is not None and not _is_positive(self.memory):
            raise SettingError(f"Device({self.name!r}, memory={self.memory!r}) must be bytes, more than 0, or None")
        if not _is_positive(self.speed):
            raise SettingError(f"Device({self.name!r}, speed={self.speed!r}) must be a number more than 0")


@dataclass(frozen=True)
class Link:
    """What connects devices: ``bandwidth`` in bytes/s, ``latency`` in seconds.

    Raises:
        SettingError: for numbers that no link has.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not (_is_positive(self.bandwidth) or self.bandwidth == math.inf):
            raise SettingError(f"Link(bandwidth={self.bandwidth!r}) must be bytes per second, more than 0")
        if not (_is_number(self.latency) and 0 <= self.latency < math.inf):
            raise SettingError(f"Link(latency={self.latency!r}) must be seconds, 0 or more")

    def seconds(self, nbytes: int) -> float:
        """How long ``nbytes`` take; nothing takes no time."""
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0


NO_LINK = Link(math.inf)
"""Between what shares memory: nothing has to travel."""


@dataclass(frozen=True)
class Spot:
    """A device of a cluster: ``device`` is number ``number`` of node ``node``."""

    node: int
    number: int
    device: Device


@dataclass(frozen=True)
class Node:
    """A machine: its ``devices``, and the ``link`` between any two of them."""

    name: str
    devices: Sequence[Device]
    link: Link = NO_LINK

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        if not self.devices:
            raise SettingError(f"Node({self.name!r}) has no devices; give it at least one Device")


@dataclass(frozen=True)
class Cluster:
    """Some ``nodes``, and the ``link`` between any two of them."""

    nodes: Sequence[Node]
    link: Link = field(default=NO_LINK)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        if not self.nodes:
            raise SettingError("Cluster(nodes=[]) has no nodes; give it at least one Node")
        names = [node.name for node in self.nodes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise SettingError(f"two nodes of the Cluster are named '{twice[0]}'; give each a name of its own")

    @property
    def spots(self) -> tuple[Spot, ...]:
        """All devices, node by node."""
        return tuple(Spot(n, d, device) for n, node in enumerate(self.nodes) for d, device in enumerate(node.devices))

    def link_between(self, one: Spot, other: Spot) -> Link:
        """What a value takes from ``one`` to ``other``."""
        if one.node != other.node:
            return self.link
        return NO_LINK if one.number == other.number else self.nodes[one.node].link


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and 0 < value < math.inf
