"""Division of the layers among devices: their order, those that are left out, and the split points.

The *period* of a division bounds the seconds for each minibatch from below: at Nm in flight it is T_max, or the sum of
all stages' times divided by Nm, whichever is more. Divisions with the least period, or with a period below a limit, are
found by dynamic programming from the last stage to the first. It looks for the least sum of times at which no stage
takes more than a given time, over (devices left, device placed last, boundary at which that one starts).

Devices are placed block by block. If there are few states, all are one block, and every order of every subset is looked
through (``exact``). Otherwise blocks are nodes, or the devices of one kind on a node, as they were given or by speed,
forwards or backwards. Any order is looked through within a block, and any devices of any block may be left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from lightning_hetpipe.planning.model.costs import Costs, Division, Room
from lightning_hetpipe.planning.model.estimate import INSTANT
from lightning_hetpipe.planning.search.device_orders import Block, DeviceOrder, Rows, orders_of_blocks
from lightning_hetpipe.planning.search.dynamic_programme import StageTakes, Ways

MOST_BOUNDARIES = 128
"""Number of boundaries between layers above which only some are looked at, and then all near those that were chosen."""

FEW_BOUNDARIES = 32
"""As many for a brief search."""

CLOSE = 1.001
"""Ratio of an upper and a lower bound of the least period at which the search for it ends."""

FARTHER, FAR = 1.02, 1 << 10
"""Ratio to a lower bound of the least period that is looked at next, and one at which such a bound says little."""


Capped: TypeAlias = Callable[[float], Sequence[StageTakes]]
"""Seconds of stages on each kind of device that take no longer than what is given."""


class Divider:
    """Divider of the layers among the devices of ``costs``.

    Args:
        costs: Seconds of stages.
        stages: k, where it is given.
        ordered: Whether the devices, each of a kind of its own, stay in their order.
        boundaries: Number of boundaries between layers above which only some are looked at.

    Attributes:
        exact: Whether every order of every subset is looked through.
        whole: Whether all boundaries are looked at.
    """

    def __init__(
        self, costs: Costs, stages: int | None = None, ordered: bool = False, boundaries: int = MOST_BOUNDARIES
    ) -> None:
        self.costs = costs
        orders, self.exact = orders_of_blocks(costs, ordered)
        self._orders = [DeviceOrder(costs, blocks, stages or 1) for blocks in orders]
        self._shift = int(stages is not None)
        self._gap = max(1, -(-costs.layers // boundaries))
        self.whole = self._gap == 1
        self._boundaries = np.unique([*range(0, costs.layers, self._gap), costs.layers])

    def least(self, in_flight: int, room: Room, synchronise: float = 0.0, low: float = 0.0) -> list[Division]:
        """Divisions with small periods, the least one first: no other one has a period smaller by 0.1%, in the orders
        and between the boundaries that are looked through.

        Args:
            in_flight: Nm.
            room: Where stages have room.
            synchronise: Seconds that a wave's end waits.
            low: A period that none is below, if that is known.
        """
        found: dict[Division, float] = {}
        takes = self._capped(room, self._boundaries)
        for order in self._orders:
            self._bisect(found, order, takes, in_flight, synchronise, low)
        high = math.inf
        while found and len(self._boundaries) <= self.costs.layers and min(found.values()) * CLOSE < high:
            best = min(found, key=found.__getitem__)
            high = found[best]
            order = DeviceOrder(self.costs, self._around(best.kinds), self._orders[0].stages)
            takes = self._capped(room, self._near(best.splits))
            self._bisect(found, order, takes, in_flight, synchronise, low)
        latest = [*found][::-1]
        return sorted(latest, key=found.__getitem__)

    def _bisect(
        self,
        found: dict[Division, float],
        order: DeviceOrder,
        takes: Capped,
        in_flight: int,
        synchronise: float,
        low: float,
    ) -> None:
        """Add divisions in ``order`` with smaller periods than those that were ``found``; none is below ``low``."""
        high = min(found.values(), default=math.inf)
        farther = FARTHER
        # Most orders are no better than the best of those before, which the first cap says then.
        cap = high / CLOSE if high < math.inf else low * farther or math.inf
        while True:
            division = self._ways(order, takes(cap)).best()
            if division is not None:
                period = found[division] = division.period(in_flight, synchronise)
                high = min(high, period)
                total = (sum(division.takes) + synchronise) / in_flight
            if math.isinf(cap):
                low = math.inf if division is None else max(low, total)  # the least sum of all
            elif division is None or total > cap:  # where stages take less, the sum is no smaller
                low = cap
            if high <= low * CLOSE or high < INSTANT:
                break
            if not low:
                cap = high / 8
            elif math.isinf(high):
                farther *= farther
                cap = low * farther if farther < FAR else math.inf
            else:
                cap = math.sqrt(low * high) if low > high / FAR else high / 8

    def within(self, period: float, in_flight: int, room: Room, synchronise: float = 0.0) -> Iterator[Division]:
        """Yield the divisions whose period is ``period`` at the most."""
        takes = self._capped(room, self._boundaries)(period)
        most = (period * in_flight - synchronise) * (1 + 1e-9)
        for order in self._orders:
            for division in self._ways(order, takes).within(most):
                if division.period(in_flight, synchronise) <= period * (1 + 1e-9):
                    yield division

    def _capped(self, room: Room, boundaries: Rows) -> Capped:
        """Seconds of stages on each kind that take no longer than a cap; of kinds that only differ in their node, one
        for all."""
        keys = [(kind.device, id(self.costs.within[kind.node])) for kind in self.costs.kinds]
        places = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True))
        takes = {key: StageTakes.of(self.costs, place, room, boundaries) for key, place in places.items()}

        @lru_cache(maxsize=2)
        def within(cap: float) -> list[StageTakes]:
            capped = {key: each.within(cap) for key, each in takes.items()}
            return [capped[key] for key in keys]

        return within

    def _ways(self, order: DeviceOrder, takes: Sequence[StageTakes]) -> Ways:
        return Ways(self.costs, order, takes, self._shift)

    def _around(self, kinds: Sequence[int]) -> list[Block]:
        """Blocks of one device each in the order of ``kinds``, with those that they leave out beside their like."""
        blocks: list[Block] = []
        for place, kind in enumerate(kinds):
            blocks.append(((kind, 1),))
            if kind not in kinds[place + 1 :]:
                blocks += [((kind, 1),)] * (len(self.costs.kinds[kind].slots) - kinds.count(kind))
        return blocks

    def _near(self, splits: Sequence[int]) -> Rows:
        """Boundaries that are near ``splits``."""
        around = np.arange(-2 * self._gap, 2 * self._gap + 1)
        near = np.unique(np.add.outer([*splits, self.costs.layers], around))
        return near[(near >= 0) & (near <= self.costs.layers)]
