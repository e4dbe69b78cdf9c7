"""Costs of stages on devices, in seconds, by the boundaries between which a stage lies.

Boundary b lies before layer b, boundary n behind the last layer. Arrays of shape (n + 1, n + 1) have the first boundary
of a stage as row, and its last boundary as column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_hetpipe.planning.model.cluster import NO_LINK, Cluster, Device, DeviceSlot, Link
from lightning_hetpipe.planning.model.profile import Profile

Floats: TypeAlias = NDArray[np.float64]

Fits: TypeAlias = NDArray[np.bool_]

TICKS = 2**40
"""Approximate number of ticks in the time of all layers. A tick is the smallest difference of times that counts."""


@dataclass(frozen=True)
class Kind:
    """Interchangeable devices: ``slots`` of one type, in the given order, with the same links to all other devices.

    ``node`` is the node of the devices. If all links of the cluster are the same, nodes do not matter, and it is 0.
    """

    slots: tuple[DeviceSlot, ...]
    node: int

    @property
    def device(self) -> Device:
        return self.slots[0].device


def kinds_of(cluster: Cluster, slots: Sequence[DeviceSlot], apart: bool = False) -> tuple[Kind, ...]:
    """Group ``slots`` into kinds, in the order of each kind's first device, or with ``apart`` each slot by itself."""
    alike = len({*_links(cluster, slots)}) <= 1
    found: dict[tuple[object, ...], list[DeviceSlot]] = {}
    for index, slot in enumerate(slots):
        found.setdefault((0 if alike else slot.node, slot.device, index if apart else -1), []).append(slot)
    return tuple(Kind(tuple(those), 0 if alike else those[0].node) for those in found.values())


def _links(cluster: Cluster, slots: Iterable[DeviceSlot]) -> list[Link]:
    first: dict[int, DeviceSlot] = {}
    pairs = [(one, slot) for slot in slots if (one := first.setdefault(slot.node, slot)) != slot]
    return [cluster.link_between(*pair) for pair in (*pairs, *pairwise(first.values()))]


class Costs:
    """Seconds of stages of a profile on ``kinds`` of devices.

    Attributes:
        own: For each kind, seconds of the layers between two boundaries: forward and backward, and with ``recompute``
            the forward twice. Infinite if no layer lies between.
        own_last: As ``own``, for the last stage, which never recomputes.
        forward: For each kind, seconds of the forwards of all layers before each boundary.
        within, across: Seconds of one transfer, by boundary: between two devices of a node (by node), and between
            nodes.
    """

    def __init__(self, profile: Profile, cluster: Cluster, kinds: Sequence[Kind], recompute: bool = False) -> None:
        self.layers = len(profile.layers)
        self.kinds = tuple(kinds)
        times = {kind.device: profile.times_on(kind.device) for kind in kinds}
        longest = max(sum(2 * each.forward + each.backward for each in own) for own in times.values())
        # Multiples of a power of two, so that sums and comparisons are exact, and ties are ties.
        tick = 2.0 ** math.ceil(math.log2(longest / TICKS)) if longest else 1.0
        known: dict[Device, tuple[Floats, Floats, Floats]] = {}
        for device, own in times.items():
            once = between([tick * round((each.forward + each.backward) / tick) for each in own])
            again = between([tick * round((2 * each.forward + each.backward) / tick) for each in own])
            known[device] = again if recompute else once, once, np.cumsum([0.0, *(each.forward for each in own)])
        self.own, self.own_last, self.forward = zip(*(known[kind.device] for kind in kinds), strict=True)
        nodes = {kind.node: [slot for each in kinds if each.node == kind.node for slot in each.slots] for kind in kinds}
        links = {node: next(iter(_links(cluster, slots)), NO_LINK) for node, slots in nodes.items()}
        hops = {link: self._hop(profile, link, tick) for link in {*links.values(), cluster.between}}
        self.within = {node: hops[link] for node, link in links.items()}
        self.across = hops[cluster.between]

    def hop(self, one: int, other: int) -> Floats:
        """Return the seconds, by boundary, of one transfer between devices of the kinds ``one`` and ``other``."""
        node = self.kinds[one].node
        return self.within[node] if node == self.kinds[other].node else self.across

    def stage(self, kinds: Sequence[int], index: int) -> Floats:
        """Return the seconds, by boundaries, of stage ``index`` if the stages lie on ``kinds``."""
        own = (self.own if index + 1 < len(kinds) else self.own_last)[kinds[index]]
        receives = self.hop(kinds[index - 1], kinds[index])[:, None] if index else 0.0
        sends = self.hop(kinds[index], kinds[index + 1])[None, :] if index + 1 < len(kinds) else 0.0
        found: Floats = own + receives + sends
        return found

    def takes(self, kinds: Sequence[int], splits: Sequence[int]) -> list[float]:
        """Return the seconds of each stage on ``kinds`` if the stages start at the layers ``splits``."""
        found = []
        for index, (start, end) in enumerate(pairwise((*splits, self.layers))):
            take = (self.own if index + 1 < len(kinds) else self.own_last)[kinds[index]][start, end]
            take += self.hop(kinds[index - 1], kinds[index])[start] if index else 0.0
            take += self.hop(kinds[index], kinds[index + 1])[end] if index + 1 < len(kinds) else 0.0
            found.append(float(take))
        return found

    def alike(self, kinds: Sequence[int]) -> tuple[object, ...]:
        """Return a key that other ``kinds`` share if they differ only in which of several equal nodes they lie on."""
        nodes = dict[int, int]()
        own = [self.kinds[kind] for kind in kinds]
        return tuple((each.device, id(self.within[each.node]), nodes.setdefault(each.node, len(nodes))) for each in own)

    def slots(self, kinds: Sequence[int]) -> tuple[DeviceSlot, ...]:
        """Choose one device for each stage on ``kinds``."""
        left = [iter(kind.slots) for kind in self.kinds]
        return tuple(next(left[kind]) for kind in kinds)

    @staticmethod
    def _hop(profile: Profile, link: Link, tick: float) -> Floats:
        inner = range(1, len(profile.layers))
        return np.array([0.0, *(tick * round(profile.crossing(link, each) / tick) for each in inner), 0.0])


def between(values: Sequence[float]) -> Floats:
    """Sum neighbouring ``values`` between any two boundaries. The result is infinite if no value lies between."""
    before = np.cumsum([0.0, *values])
    return np.where(np.tri(len(before), dtype=bool), np.inf, before[None, :] - before[:, None])


@dataclass(frozen=True)
class Room:
    """Room of the devices for stages, by their boundaries.

    ``fits`` returns two arrays for a kind of device: whether a stage fits there, and whether the last stage fits.
    ``before`` and ``last`` are the bytes of a stage before the last one, and of the last stage.
    """

    fits: Callable[[int], tuple[Fits, Fits]]
    before: Floats
    last: Floats


@dataclass(frozen=True)
class Division:
    """Division of layers among devices: for each stage the kind of its device, its first layer, and its seconds."""

    kinds: tuple[int, ...]
    splits: tuple[int, ...]
    takes: tuple[float, ...] = field(compare=False)

    @classmethod
    def of(cls, costs: Costs, kinds: Sequence[int], splits: Sequence[int]) -> Division:
        return cls(tuple(kinds), tuple(splits), tuple(costs.takes(kinds, splits)))

    @property
    def bottleneck(self) -> float:
        """T_max in seconds."""
        return max(self.takes)

    def period(self, in_flight: int, synchronise: float = 0.0) -> float:
        """Return a lower bound of the seconds per minibatch, if each wave's end waits ``synchronise`` seconds."""
        return max(self.bottleneck, (sum(self.takes) + synchronise) / in_flight)
