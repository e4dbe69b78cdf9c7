"""Division of the layers among devices: their order, the devices that are left out, and the split points.

The *period* of a division is a lower bound of the seconds per minibatch: T_max, or the sum of all stages' times divided
by Nm if that is larger. Dynamic programming from the last stage to the first finds divisions with the smallest period,
or with a period below a limit. It minimises the sum of times under a cap for each stage's time. Its states are the
placed devices, the foremost device, and the boundary at which the foremost stage starts.

Devices are placed block by block. If there are few states, all devices are one block, and every order of every subset
is searched (``exact``). Otherwise blocks are nodes, or the devices of one kind on a node, in the given order or by
speed, forwards or backwards. Any order is searched within a block, and any devices may be left out. With one order of
blocks, a plan for 8 nodes of 2 is 5% slower, with two orders 1%.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_hetpipe.planning.model.costs import Costs, Division, Floats, Room
from lightning_hetpipe.planning.model.estimate import INSTANT

MOST_BOUNDARIES = 128
"""Number of boundaries between layers up to which all are searched. Else some are searched, and then all near
the best."""

MOST_ROWS = 3000
"""Largest number of states that are searched for one block."""

CLOSE = 1.001
"""Ratio of an upper and a lower bound of the least period at which the search ends."""

FARTHER, FAR = 1.02, 1 << 10
"""Ratio to a known bound of the least period that is tried next, and the ratio at which the bound says little."""

CELLS = 1 << 20
"""Largest count of numbers that are computed at once."""

SLIGHT = 1e-5
"""Fraction of the time of all layers with which the square of their bytes is weighted.

So of equally fast divisions, the one with few bytes on each device wins. Without this, a plan of 128 devices for
several virtual workers is 2% slower.
"""

LINKS = range(2)
"""Index of a link: 0 within a node, 1 across nodes."""

Block: TypeAlias = tuple[tuple[int, int], ...]
"""Kinds, and the number of devices of each kind."""

Rows: TypeAlias = NDArray[np.intp]

Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The kind of each stage's device, and the index of its first boundary among the searched boundaries."""


class Divider:
    """Divider of the layers among the devices of ``costs``, into ``stages`` stages if that is given.

    With ``ordered``, the devices, each of a kind of its own, stay in their order. ``exact`` is True if every order of
    every subset of the devices is searched, and ``whole`` if all boundaries are searched.
    """

    def __init__(self, costs: Costs, stages: int | None = None, ordered: bool = False) -> None:
        self.costs = costs
        everything = tuple((kind, len(each.slots)) for kind, each in enumerate(costs.kinds))
        self.exact = ordered or _states(everything) <= MOST_ROWS
        if ordered:
            orders: list[list[Block]] = [[(each,) for each in everything]]
        else:
            orders = [[everything]] if self.exact else _orders_by_speed(costs)
        self._orders = [DeviceOrder(costs, blocks, stages or 1) for blocks in orders]
        self._shift = int(stages is not None)
        self._gap = max(1, -(-costs.layers // MOST_BOUNDARIES))
        self.whole = self._gap == 1
        self._boundaries = np.unique([*range(0, costs.layers, self._gap), costs.layers])

    def least(self, in_flight: int, room: Room, synchronise: float = 0.0, known: float = 0.0) -> list[Division]:
        """Find divisions with small periods, sorted. Among the searched ones, none is better than the first by 0.1%.

        A wave's end waits ``synchronise`` seconds. ``known`` is a known lower bound of the period, or 0.
        """
        found: dict[Division, float] = {}

        def bisect(order: DeviceOrder, boundaries: Rows) -> None:
            """Add divisions in ``order`` with smaller periods than those found before."""
            takes, low, high, farther = self._capped(room, boundaries), known, min(found.values(), default=inf), FARTHER
            # The first cap shows whether an order is better than those before, which most orders are not.
            cap = high / CLOSE if found else low * farther or inf
            while True:
                total = inf
                if (division := Ways(self.costs, order, takes(cap), self._shift).best()) is not None:
                    found[division] = division.period(in_flight, synchronise)
                    high, total = min(high, found[division]), (sum(division.takes) + synchronise) / in_flight
                if cap == inf:
                    low = max(low, total)
                elif total > cap:
                    low = cap  # stages that take less sum up to more
                if high <= low * CLOSE or high < INSTANT:
                    return
                if high == inf:
                    farther *= farther
                    cap = low * farther if farther < FAR else inf
                else:
                    cap = math.sqrt(low * high) if low > high / FAR else high / 8

        for order in self._orders:
            bisect(order, self._boundaries)
        high, around = inf, np.arange(-2 * self._gap, 2 * self._gap + 1)
        while found and not self.whole and min(found.values()) * CLOSE < high:
            best = min(found, key=found.__getitem__)
            high = found[best]
            near = np.unique(np.add.outer([*best.splits, self.costs.layers], around))
            near = near[(near >= 0) & (near <= self.costs.layers)]
            bisect(DeviceOrder(self.costs, self._around(best.kinds), self._orders[0].stages), near)
        latest = [*found][::-1]
        return sorted(latest, key=found.__getitem__)

    def within(self, period: float, in_flight: int, room: Room, synchronise: float = 0.0) -> Iterator[Division]:
        """Yield the divisions with a period of at most ``period``."""
        takes = self._capped(room, self._boundaries)(period)
        most = (period * in_flight - synchronise) * (1 + 2 * SLIGHT)
        for order in self._orders:
            for division in Ways(self.costs, order, takes, self._shift).within(most):
                if division.period(in_flight, synchronise) <= period * (1 + 1e-9):
                    yield division

    def _capped(self, room: Room, boundaries: Rows) -> Callable[[float], Sequence[StageTakes]]:
        """Return a function from a cap in seconds to the times of stages on each kind that stay below the cap.

        Kinds that differ only in their node share one object.
        """
        keys = [(kind.device, id(self.costs.within[kind.node])) for kind in self.costs.kinds]
        places = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True))
        takes = {key: StageTakes.of(self.costs, place, room, boundaries) for key, place in places.items()}

        @lru_cache(maxsize=2)
        def within(cap: float) -> list[StageTakes]:
            capped = {key: each.within(cap) for key, each in takes.items()}
            return [capped[key] for key in keys]

        return within

    def _around(self, kinds: Sequence[int]) -> list[Block]:
        """Make blocks of one device in the order of ``kinds``, with unused devices beside devices of their kind."""
        blocks: list[Block] = []
        for place, kind in enumerate(kinds):
            blocks.append(((kind, 1),))
            if kind not in kinds[place + 1 :]:
                blocks += [((kind, 1),)] * (len(self.costs.kinds[kind].slots) - kinds.count(kind))
        return blocks


@dataclass(frozen=True)
class StageTakes:
    """Seconds of stages on one kind of device, increased slightly by their bytes. Infinite if they have no room.

    Attributes:
        stage: Array by the link to the stage behind, the link to the stage before, the first boundary, and the number
            of boundaries between it and the last one.
        last: Times of the last stage, by the link to the stage before and by the first boundary.
        shortest: Smallest time in ``stage`` for each number of boundaries in between.
        ends: The last boundary, by the first boundary and the number of boundaries in between.
        boundaries: The searched boundaries. All other attributes have indices into them.
    """

    stage: Floats
    last: Floats
    shortest: Floats
    ends: Rows
    boundaries: Rows

    @classmethod
    def of(cls, costs: Costs, kind: int, room: Room, boundaries: Rows) -> StageTakes:
        """Compute the times of stages on ``kind`` for which there is ``room``."""
        hops = np.stack([costs.within[costs.kinds[kind].node], costs.across])[:, boundaries]
        fits, fits_last = room.fits(kind)
        slight = SLIGHT * min(float(own[0, -1]) for own in costs.own)
        before, behind = (
            slight * (each / max(1.0, float(room.before[0, -1]))) ** 2 for each in (room.before, room.last)
        )
        most = len(boundaries) - 1
        ends = np.arange(most + 1)[:, None] + 1 + np.arange(most)
        inside, ends = ends <= most, np.minimum(ends, most)
        chosen = boundaries[:, None], boundaries[ends]
        own = np.where(inside & fits[chosen], costs.own[kind][chosen] + before[chosen], np.inf)
        stage = own + hops[:, ends][:, None] + hops[None, :, :, None]
        own_last = costs.own_last[kind][boundaries, -1] + behind[boundaries, -1]
        last = np.where(fits_last[boundaries, -1], own_last + hops, np.inf)
        return cls(stage, last, stage.min(axis=(0, 1, 2)), ends, boundaries)

    def within(self, cap: float) -> StageTakes:
        """Drop the stages that take more than ``cap`` seconds."""
        cap *= 1 + 2 * SLIGHT
        short = np.flatnonzero(self.shortest <= cap)
        width = slice(int(short[-1]) + 1 if len(short) else 1)
        stage, last = self.stage[..., width], self.last
        stage, last = np.where(stage <= cap, stage, np.inf), np.where(last <= cap, last, np.inf)
        return StageTakes(stage, last, self.shortest[width], self.ends[:, width], self.boundaries)

    def least(self, behind: Floats, link: int) -> Floats:
        """Return the smallest sums of a stage and of the stages ``behind`` it, an array of shape (rows, n + 1).

        The result is by the link to the stage before, the row, and the first boundary.
        """
        found = np.empty((len(LINKS), *behind.shape))
        step = max(1, CELLS // self.stage[link].size)
        for first in range(0, len(behind), step):
            rows = slice(first, first + step)
            found[:, rows] = (behind[rows][None, :, self.ends] + self.stage[link][:, None]).min(axis=3)
        return found


class Ways:
    """Ways to place stages that take ``takes``: the smallest sum of times for each state and boundary.

    Each state has two sums, for a link to the stage before within the node (0) and across nodes (1).
    """

    def __init__(self, costs: Costs, order: DeviceOrder, takes: Sequence[StageTakes], shift: int) -> None:
        self._costs, self._order, self._takes, self._shift = costs, order, takes, shift
        self._boundaries = takes[0].boundaries
        shape = len(LINKS), order.stages, len(order.kind_of), len(self._boundaries)
        self._least = np.full(shape, np.inf)
        nodes = {node: place for place, node in enumerate(costs.within)}
        others = [[place for place in nodes.values() if place != here] for here in nodes.values()]
        behind = np.full((len(nodes), *shape[:2], shape[3]), np.inf)  # by the node of the foremost device
        for transitions, foremost in order.blocks:
            for transition in transitions:
                if transition.first:
                    here = nodes[costs.kinds[transition.kind].node]
                    self._least[:, 0, transition.rows] = takes[transition.kind].last[:, None]
                    sources = [behind[here, 0][:, None]]
                    if len(nodes) > 1:
                        sources.append(behind[others[here], 1].min(axis=0)[:, None])
                else:
                    rows = transition.near, transition.far
                    sources = [self._least[link][:, each].min(axis=2) for link, each in enumerate(rows)]
                for link, each in enumerate(sources):
                    self._place(transition, link, each)
            for node, own in foremost:  # any of these may lie behind any of the blocks to come
                there = behind[nodes[node]]
                np.minimum(there, self._least[:, :, own].min(axis=2), out=there)

    def _place(self, transition: Transition, link: int, behind: Floats) -> None:
        """Place the devices of ``transition`` before ``behind``, an array of shape (stages, rows, n + 1)."""
        for depth in range(self._order.stages - self._shift):
            if not self._shift or np.isfinite(behind[depth]).any():
                found = self._least[:, depth + self._shift, transition.rows]
                np.minimum(found, self._takes[transition.kind].least(behind[depth], link), out=found)

    def best(self) -> Division | None:
        """Return the division with the smallest sum of times, or None."""
        least = float(self._least[0, -1, :, 0].min())
        return next(self.within(least * (1 + 1e-9)), None) if least < math.inf else None

    def within(self, total: float) -> Iterator[Division]:
        """Yield the divisions whose times sum up to at most ``total``, depth first."""
        starts = self._least[0, -1, :, 0]
        rows = np.flatnonzero((starts <= total) & np.isfinite(starts))
        for row in rows[starts[rows].argsort()].tolist():
            for kinds, places in self._from(row, 0, 0, self._order.stages - 1, min(total, sys.float_info.max)):
                yield Division.of(self._costs, kinds, self._boundaries[[*places]].tolist())

    def _from(self, row: int, link: int, first: int, depth: int, left: float) -> Iterator[Place]:
        """Yield the kinds and first boundaries of stages that take at most ``left`` seconds, the smallest sums first.

        The foremost stage belongs to ``row``, begins at the boundary ``first``, and receives over ``link``. For a given
        k, ``depth`` stages follow.
        """
        kind, transition = self._order.kind_of[row], self._order.transition_to[row]
        assert transition is not None
        takes = self._takes[kind]
        if transition.first and not (self._shift and depth) and takes.last[link, first] <= left:
            yield (kind,), (first,)
        found: list[tuple[float, float, int, int, int]] = []
        for behind, sources in enumerate(self._order.sources(row) if depth >= self._shift else ()):
            own = takes.stage[behind, link, first, : len(self._boundaries) - 1 - first]
            sums = own + self._least[behind, depth - self._shift, sources, first + 1 : first + 1 + len(own)]
            rows, ends = (sums <= left).nonzero()
            parts = sums[rows, ends], own[ends], sources[rows], ends + first + 1
            found += ((*each, behind) for each in zip(*(part.tolist() for part in parts), strict=True))
        for _, before, source, end, behind in sorted(found):
            for kinds, places in self._from(source, behind, end, depth - self._shift, left - before):
                yield (kind, *kinds), (first, *places)


@dataclass(frozen=True)
class Transition:
    """States ``rows`` that are reached by placing devices of ``kind``.

    Attributes:
        near, far: For each row the states behind it, with their foremost device on its node or on another, padded with
            row 0.
        start: First row of the block.
        first: Whether it places the first device of a block, so any state of the blocks behind may lie behind it.
    """

    kind: int
    rows: slice
    near: Rows
    far: Rows
    start: int
    first: bool


class DeviceOrder:
    """States of ``blocks``, of which the last block is placed first. Row 0 is a state that is never reached.

    Attributes:
        stages: k if it is given, else 1.
        kind_of, transition_to: For each row the kind of its foremost device, and its transition.
        blocks: For each block in the order of placement its transitions, and its rows by the foremost device's node.
    """

    def __init__(self, costs: Costs, blocks: Sequence[Block], stages: int) -> None:
        self.stages = stages
        self.kind_of = [-1]
        self.transition_to: list[Transition | None] = [None]
        self.blocks: list[tuple[list[Transition], list[tuple[int, Rows]]]] = []
        self._node = [kind.node for kind in costs.kinds]
        self._sources: dict[int, tuple[Rows, Rows]] = {}
        for block in reversed(blocks):
            self._add(block)
        self._node_of = np.array([-1, *(self._node[kind] for kind in self.kind_of[1:])])

    def sources(self, row: int) -> tuple[Rows, Rows]:
        """Return the rows behind ``row``, with the foremost device on its node and on other nodes."""
        if (known := self._sources.get(row)) is not None:
            return known
        transition = self.transition_to[row]
        assert transition is not None
        if transition.first:
            here = self._node_of[: transition.start] == self._node_of[row]
            here[0] = False
            near, far = np.flatnonzero(here), np.flatnonzero(~here)[1:]
        else:
            near, far = (each[row - transition.rows.start] for each in (transition.near, transition.far))
            near, far = near[near > 0], far[far > 0]
        self._sources[row] = near, far
        return near, far

    def _add(self, block: Block) -> None:
        start = len(self.kind_of)
        rows: dict[tuple[tuple[int, ...], int], int] = {}
        levels: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for counts in product(*(range(number + 1) for _, number in block)):
            for place, number in enumerate(counts):
                if number:
                    levels.setdefault((sum(counts), place), []).append(counts)
        transitions: list[Transition] = []
        for (level, place), these in sorted(levels.items()):
            kind, first = block[place][0], len(self.kind_of)
            near: list[list[int]] = []
            far: list[list[int]] = []
            for counts in these:
                before = (*counts[:place], counts[place] - 1, *counts[place + 1 :])
                sources = [(self._node[block[p][0]], rows[before, p]) for p, each in enumerate(before) if each]
                near.append([row for node, row in sources if node == self._node[kind]])
                far.append([row for node, row in sources if node != self._node[kind]])
                rows[counts, place] = len(self.kind_of)
                self.kind_of.append(kind)
            there = slice(first, len(self.kind_of))
            transition = Transition(kind, there, _padded(near), _padded(far), start, level == 1)
            transitions.append(transition)
            self.transition_to += [transition] * (there.stop - first)
        own = np.array([self._node[kind] for kind in self.kind_of[start:]], dtype=np.intp)
        nodes = [(int(node), start + np.flatnonzero(own == node)) for node in np.unique(own)]
        self.blocks.append((transitions, nodes))


def _padded(lists: Sequence[Sequence[int]]) -> Rows:
    width = max(1, *map(len, lists))
    return np.array([[*each, *[0] * (width - len(each))] for each in lists], dtype=np.intp)


def _states(block: Block) -> int:
    """Approximate number of states of a block."""
    return len(block) * math.prod(number + 1 for _, number in block)


def _orders_by_speed(costs: Costs) -> list[list[Block]]:
    """Order nodes, and the devices of one kind on a node, as given and by speed."""
    by_kind: list[Block] = [((kind, len(each.slots)),) for kind, each in enumerate(costs.kinds)]
    by_node: list[Block] = []
    for node in costs.within:
        own = tuple((kind, len(each.slots)) for kind, each in enumerate(costs.kinds) if each.node == node)
        by_node += [own] if _states(own) <= MOST_ROWS else [(each,) for each in own]

    def slowness(block: Block) -> float:
        seconds = [float(costs.own_last[kind][0, -1]) for kind, number in block for _ in range(number)]
        return sum(seconds) / len(seconds)

    orders = []
    for blocks in (by_node, by_kind):
        for found in (blocks, sorted(blocks, key=slowness)):
            orders += [each for each in (found, found[::-1]) if each not in orders]
    return orders
