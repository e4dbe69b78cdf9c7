"""Costs of stages on devices: time in whole ticks, so that sums and comparisons are exact, and bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_hetpipe.planning.model.cluster import Cluster, Device, DeviceSlot, Link
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile
from lightning_hetpipe.planning.model.simulate import StageLoad
from lightning_hetpipe.planning.model.stage_memory import more

Ticks: TypeAlias = NDArray[np.int64]
"""Ticks by boundary: boundary b lies before layer b, boundary n behind the last layer."""

NEVER = 2**62
"""Ticks that stand for "not possible"."""

TOTAL = 2**50
"""Approximate ticks of the whole model on its slowest device, transfers included; it defines the tick."""


@dataclass(frozen=True)
class Kind:
    """Interchangeable devices: of the same type, with the same links to all others.

    Attributes:
        slots: Those that there are, in the order in which they were given.
        group: Kinds of one group are linked to any third alike.
    """

    slots: tuple[DeviceSlot, ...]
    group: int

    @property
    def device(self) -> Device:
        return self.slots[0].device


def kinds_of(cluster: Cluster, slots: Sequence[DeviceSlot], apart: bool = False) -> tuple[Kind, ...]:
    """The kinds of ``slots``, in the order of their first ones; ``apart`` makes each slot one of its own.

    Nodes matter only where not all links are the same.
    """
    pairs = [(one, other) for index, one in enumerate(slots) for other in slots[:index]]
    alike = len({cluster.link_between(*pair) for pair in pairs}) <= 1
    found: dict[tuple[object, ...], list[DeviceSlot]] = {}
    for index, slot in enumerate(slots):
        group = 0 if alike else slot.node
        found.setdefault((group, slot.device, index if apart else -1), []).append(slot)
    return tuple(Kind(tuple(those), 0 if alike else those[0].node) for those in found.values())


class Costs:
    """Times of the layers of ``profile`` on ``kinds`` of devices, in ticks.

    Attributes:
        layers: n.
        kinds: The devices.
        tick: Seconds.
        before: Of each kind, ticks of the layers before each boundary: forward and backward, and with ``recompute``
            forward twice.
        before_last: The same for the last stage, which computes nothing again.
    """

    def __init__(self, profile: Profile, cluster: Cluster, kinds: Sequence[Kind], recompute: bool = False) -> None:
        self.layers = len(profile.layers)
        self.kinds = tuple(kinds)
        self._profile = profile
        times = [profile.times_on(kind.device) for kind in kinds]
        once = [[each.forward + each.backward for each in own] for own in times]
        again = [[2 * each.forward + each.backward for each in own] for own in times] if recompute else once
        links = _links(cluster, kinds)
        most = max(map(sum, again)) + 2 * max(sum(self._crossings(link)) for link in links.values())
        self.tick = 2.0 ** math.ceil(math.log2(most / TOTAL)) if most else 1.0
        self.before = [self._sums(each) for each in again]
        self.before_last = [self._sums(each) for each in once]
        self._hops = {groups: self._hop(link) for groups, link in links.items()}
        self._backwards = np.tri(self.layers + 1, dtype=bool)

    def hop(self, one: int, other: int) -> Ticks:
        """Ticks, by boundary, of one transfer between two devices of the groups ``one`` and ``other``."""
        return self._hops[one, other]

    def stage(self, kinds: Sequence[int], index: int) -> Ticks:
        """Ticks of stage ``index`` of those on ``kinds``, by its first boundary (rows) and its last (columns)."""
        own = (self.before if index + 1 < len(kinds) else self.before_last)[kinds[index]]
        groups = [self.kinds[kind].group for kind in kinds]
        take = own[None, :] - own[:, None]
        if index:
            take += self.hop(groups[index - 1], groups[index])[:, None]
        if index + 1 < len(kinds):
            take += self.hop(groups[index], groups[index + 1])[None, :]
        take[self._backwards] = NEVER
        return take

    def bottleneck(self, kinds: Sequence[int], splits: Sequence[int]) -> int:
        """T_max in ticks of stages that start at ``splits``."""
        return max(self.takes(kinds, splits))

    def takes(self, kinds: Sequence[int], splits: Sequence[int]) -> list[int]:
        """Ticks of each stage, where they start at ``splits``."""
        groups = [self.kinds[kind].group for kind in kinds]
        ends = [*splits[1:], self.layers]
        found = []
        for index, (start, end) in enumerate(zip(splits, ends, strict=True)):
            own = (self.before if index + 1 < len(kinds) else self.before_last)[kinds[index]]
            take = int(own[end] - own[start])
            take += int(self.hop(groups[index - 1], groups[index])[start]) if index else 0
            take += int(self.hop(groups[index], groups[index + 1])[end]) if index + 1 < len(kinds) else 0
            found.append(take)
        return found

    def slots(self, kinds: Sequence[int]) -> tuple[DeviceSlot, ...]:
        """The devices for stages on ``kinds``."""
        left = [iter(kind.slots) for kind in self.kinds]
        return tuple(next(left[kind]) for kind in kinds)

    def _sums(self, seconds: Iterable[float]) -> Ticks:
        ticks = np.array([0, *(round(each / self.tick) for each in seconds)], dtype=np.int64)
        return np.cumsum(ticks)

    def _hop(self, link: Link) -> Ticks:
        ticks = [round(seconds / self.tick) for seconds in self._crossings(link)[:-1]]
        return np.array([0, *ticks, 0], dtype=np.int64)

    def _crossings(self, link: Link) -> list[float]:
        """Seconds that the output of each layer takes over ``link``."""
        return [self._profile.crossing(link, layer + 1) for layer in range(self.layers)]


def _links(cluster: Cluster, kinds: Sequence[Kind]) -> dict[tuple[int, int], Link]:
    """Links by pairs of groups; the one from a device to itself where a group has no other device."""
    slots = [(kind.group, slot) for kind in kinds for slot in kind.slots]
    found: dict[tuple[int, int], Link] = {}
    for one, here in slots:
        for other, there in slots:
            if here != there or (one, other) not in found:
                found[one, other] = cluster.link_between(here, there)
    return found


class MemoryBound:
    """Memory bound of stages: how far each may reach before its device is full.

    Args:
        layers: The model's.
        kinds: Of devices.
        in_flight: Nm.
        state: The optimizer's bytes for each byte of the weights.
        recompute: Whether forwards are computed again.
        loads: By the distance from the last stage, what a stage there holds at one time or another; beyond, as the last
            of them.
        user: Bytes that user code takes on the last stage's device.
        buffers: Copies of the weights that versions take; by default Nm.
        limited: Whether devices have limits at all.
    """

    def __init__(
        self,
        layers: Sequence[LayerBytes],
        kinds: Sequence[Kind],
        in_flight: int,
        state: float,
        recompute: bool,
        loads: Sequence[Collection[StageLoad]],
        user: int = 0,
        buffers: int | None = None,
        limited: bool = True,
    ) -> None:
        self._buffers = in_flight if buffers is None else buffers
        self._user = user
        self._layers = layers
        self._limits = [kind.device.memory if limited else None for kind in kinds]
        self._state = state
        self._recompute = recompute
        self._loads = [frozenset(each) for each in loads]
        self._known: dict[tuple[frozenset[StageLoad], int], Ticks | None] = {}

    def reach(self, kind: int, distance: int) -> Ticks | None:
        """Last boundary at which a stage may end, by the one at which it starts; None where memory is no limit.

        Args:
            kind: Of its device.
            distance: From the last stage, which is at 0.
        """
        loads = self._loads[min(distance, len(self._loads) - 1)]
        limit = self._limits[kind]
        if limit is None:
            return None
        limit -= 0 if distance else self._user
        key = loads, limit
        if key not in self._known:
            ends = np.minimum.reduce([self._ends(load, limit) for load in loads])
            self._known[key] = None if (ends == len(ends) - 1).all() else ends
        return self._known[key]

    def _ends(self, load: StageLoad, limit: float) -> Ticks:
        """Last boundary of a stage that takes up to ``limit`` bytes, by its first one. A longer stage takes no less."""
        first = np.arange(len(self._layers) + 1)
        fits, last = first, np.full_like(first, len(first) - 1)
        while (fits < last).any():
            middle = (fits + last + 1) // 2
            good = self._bytes(load, first, middle) <= limit
            fits, last = np.where(good, middle, fits), np.where(good, last, np.maximum(middle - 1, fits))
        return fits

    def _bytes(self, load: StageLoad, first: Ticks, after: Ticks) -> NDArray[np.float64]:
        """Bytes of stages between boundaries."""
        sizes = self._sizes
        weights = sizes.weights[after] - sizes.weights[first]
        kept = sizes.added[after] - sizes.starts[first] + sizes.kept[first]
        inputs = sizes.inputs[first]
        activations = load.held * inputs + load.whole * (kept - inputs) if self._recompute else load.held * kept
        total = (2 + self._buffers + load.waiting) * weights + np.floor(self._state * weights)
        result: NDArray[np.float64] = total + activations + sizes.largest(first, after)
        return result

    @cached_property
    def _sizes(self) -> _Sizes:
        return _Sizes(self._layers)


class _Sizes:
    """Prefix sums of :class:`~lightning_hetpipe.planning.model.stage_memory.Sizes`, by boundary."""

    def __init__(self, layers: Sequence[LayerBytes]) -> None:
        self.weights = np.cumsum([0.0, *(layer.parameters for layer in layers)])
        self.added = np.cumsum([0.0, 0.0, *(more(one, other) for one, other in pairwise(layers))])  # since the first
        self.starts = np.append(self.added[1:], 0.0)
        self.kept = np.array([*(layer.kept for layer in layers), 0.0])
        outputs = [0, *(layer.output for layer in layers)]
        self.inputs = np.array(
            [*(layer.given or before for layer, before in zip(layers, outputs[:-1], strict=True)), 0.0]
        )
        windows = [self.kept]  # of the next 1, 2, 4, ... layers
        while (half := 1 << len(windows) - 1) <= len(layers) // 2:
            windows.append(np.maximum(windows[-1], np.append(windows[-1][half:], np.zeros(half))))
        self._windows = np.stack(windows)

    def largest(self, first: Ticks, after: Ticks) -> NDArray[np.float64]:
        """Largest bytes that one layer between boundaries keeps, from two overlapping windows."""
        level = np.log2(np.maximum(after - first, 1)).astype(np.intp)
        result: NDArray[np.float64] = np.maximum(
            self._windows[level, first], self._windows[level, after - (1 << level)]
        )
        return result
