"""Division of the layers among devices: their order, those that are left out, and the split points.

The *period* of a division bounds the seconds for each minibatch from below: at Nm in flight it is T_max, or the sum of
all stages' times divided by Nm, whichever is more. Divisions with the least period, or with a period below a limit, are
found by dynamic programming from the last stage to the first. It looks for the least sum of times at which no stage
takes more than a given time, over states (which devices are placed, which of them is the foremost) and the boundary at
which the foremost stage starts.

Devices are placed block by block. If there are few states, all are one block, and every order of every subset is looked
through (``exact``). Otherwise blocks are nodes, or the devices of one kind on a node, as they were given or by speed,
forwards or backwards. Any order is looked through within a block, and any devices of any block may be left out. With
one order of blocks, a plan for 8 nodes of 2 is 5% slower; with two, 1%.
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
"""Number of boundaries between layers above which only some are looked at, and then all near those that were chosen."""

MOST_ROWS = 3000
"""Largest number of states that are looked through for one block."""

CLOSE = 1.001
"""Ratio of an upper and a lower bound of the least period at which the search for it ends."""

FARTHER, FAR = 1.02, 1 << 10
"""Ratio to a known bound of the least period that is looked at next, and one at which such a bound says little."""

CELLS = 1 << 20
"""Numbers that are worked on at once."""

SLIGHT = 1e-5
"""Part of the time of all layers that the square of their bytes counts as, so that of divisions as fast one with few
bytes on each device is the best. Without this, a plan of 128 devices for several virtual workers is 2% slower."""

LINKS = range(2)
"""Within a node, and across nodes."""

Block: TypeAlias = tuple[tuple[int, int], ...]
"""Kinds and how many of each there are."""

Rows: TypeAlias = NDArray[np.intp]

Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The kind of each stage's device, and the place of its first boundary among those that are looked at."""


class Divider:
    """Divider of the layers among the devices of ``costs``.

    Args:
        costs: Seconds of stages.
        stages: k, where it is given.
        ordered: Whether the devices, each of a kind of its own, stay in their order.

    Attributes:
        exact: Whether every order of every subset is looked through.
        whole: Whether all boundaries are looked at.
    """

    def __init__(self, costs: Costs, stages: int | None = None, ordered: bool = False) -> None:
        self.costs = costs
        orders, self.exact = orders_of_blocks(costs, ordered)
        self._orders = [DeviceOrder(costs, blocks, stages or 1) for blocks in orders]
        self._shift = int(stages is not None)
        self._gap = max(1, -(-costs.layers // MOST_BOUNDARIES))
        self.whole = self._gap == 1
        self._boundaries = np.unique([*range(0, costs.layers, self._gap), costs.layers])

    def least(self, in_flight: int, room: Room, synchronise: float = 0.0, known: float = 0.0) -> list[Division]:
        """Divisions with small periods, the least one first: no other one has a period smaller by 0.1%, in the orders
        and between the boundaries that are looked through.

        Args:
            in_flight: Nm.
            room: Where stages have room.
            synchronise: Seconds that a wave's end waits.
            known: A period that none is below, if one is known.
        """
        found: dict[Division, float] = {}

        def bisect(order: DeviceOrder, boundaries: Rows) -> None:
            """Add divisions in ``order`` with smaller periods than those that were found."""
            takes, low, high, farther = self._capped(room, boundaries), known, min(found.values(), default=inf), FARTHER
            # Most orders are no better than the best of those before, which the first cap says.
            cap = high / CLOSE if found else low * farther or inf
            while True:
                total = inf
                if (division := self._ways(order, takes(cap)).best()) is not None:
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
        high = inf
        while found and not self.whole and min(found.values()) * CLOSE < high:
            best = min(found, key=found.__getitem__)
            high = found[best]
            bisect(DeviceOrder(self.costs, self._around(best.kinds), self._orders[0].stages), self._near(best.splits))
        latest = [*found][::-1]
        return sorted(latest, key=found.__getitem__)

    def within(self, period: float, in_flight: int, room: Room, synchronise: float = 0.0) -> Iterator[Division]:
        """Yield the divisions whose period is ``period`` at the most."""
        takes = self._capped(room, self._boundaries)(period)
        most = (period * in_flight - synchronise) * (1 + 2 * SLIGHT)
        for order in self._orders:
            for division in self._ways(order, takes).within(most):
                if division.period(in_flight, synchronise) <= period * (1 + 1e-9):
                    yield division

    def _capped(self, room: Room, boundaries: Rows) -> Callable[[float], Sequence[StageTakes]]:
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


@dataclass(frozen=True)
class StageTakes:
    """Seconds of stages on one kind of device, and slightly more for their bytes; infinite where they have no room.

    Attributes:
        stage: By the link to the stage behind and by that to the one before, by the first boundary, and by how many lie
            between that and the last one.
        last: Of the last stage, by the link to the stage before and by its first boundary.
        shortest: The least of all in ``stage`` with as many boundaries between the first and the last one.
        ends: The last boundary, by the first one, and by how many lie between them.
        boundaries: Those that are looked at; others are given as places among them.
    """

    stage: Floats
    last: Floats
    shortest: Floats
    ends: Rows
    boundaries: Rows

    @classmethod
    def of(cls, costs: Costs, kind: int, room: Room, boundaries: Rows) -> StageTakes:
        """Seconds where there is ``room``."""
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
        """Those that take ``cap`` seconds at the most."""
        cap *= 1 + 2 * SLIGHT
        short = np.flatnonzero(self.shortest <= cap)
        width = slice(int(short[-1]) + 1 if len(short) else 1)
        stage, last = self.stage[..., width], self.last
        stage, last = np.where(stage <= cap, stage, np.inf), np.where(last <= cap, last, np.inf)
        return StageTakes(stage, last, self.shortest[width], self.ends[:, width], self.boundaries)

    def least(self, behind: Floats, link: int) -> Floats:
        """Least sums of a stage and of what lies ``behind`` it, (rows, n + 1), by the link to the stage before and by
        the first boundary."""
        found = np.empty((len(LINKS), *behind.shape))
        step = max(1, CELLS // self.stage[link].size)
        for first in range(0, len(behind), step):
            rows = slice(first, first + step)
            found[:, rows] = (behind[rows][None, :, self.ends] + self.stage[link][:, None]).min(axis=3)
        return found


class Ways:
    """Ways to place stages that take ``takes``: for each state and boundary the least sum.

    Of each state there are two sums, for a link to the stage before that is within the node (0) or across nodes (1).
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
        """Place the devices of ``transition`` before ``behind``, (stages, rows, n + 1)."""
        for depth in range(self._order.stages - self._shift):
            if not self._shift or np.isfinite(behind[depth]).any():
                found = self._least[:, depth + self._shift, transition.rows]
                np.minimum(found, self._takes[transition.kind].least(behind[depth], link), out=found)

    def best(self) -> Division | None:
        """The division with the least sum of times; None if there is none."""
        least = float(self._least[0, -1, :, 0].min())
        return next(self.within(least * (1 + 1e-9)), None) if least < math.inf else None

    def within(self, total: float) -> Iterator[Division]:
        """Yield the divisions whose times sum up to ``total`` at the most, depth first."""
        starts = self._least[0, -1, :, 0]
        rows = np.flatnonzero((starts <= total) & np.isfinite(starts))
        for row in rows[starts[rows].argsort()].tolist():
            for kinds, places in self._from(row, 0, 0, self._order.stages - 1, min(total, sys.float_info.max)):
                yield Division.of(self._costs, kinds, self._boundaries[[*places]].tolist())

    def _from(self, row: int, link: int, first: int, depth: int, left: float) -> Iterator[Place]:
        """Yield the kinds and first boundaries of stages in ``left`` seconds, the smallest sums first.

        The foremost stage is that of ``row``, begins at the boundary ``first``, and receives over ``link``. If k is
        given, ``depth`` stages follow.
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
    """States that are reached by placing devices of ``kind``.

    Attributes:
        rows: Those states.
        near, far: For each of them the states behind it, whose foremost device is on the same node or on another,
            padded with row 0.
        start: The first row of the block.
        first: Whether it places the first device of a block, so that any state of the blocks behind lies behind it.
    """

    kind: int
    rows: slice
    near: Rows
    far: Rows
    start: int
    first: bool


class DeviceOrder:
    """States of ``blocks``, of which the last one is placed first. Row 0 is a state that no way leads to.

    Attributes:
        stages: k, where it is given, else 1.
        kind_of, transition_to: For each row, the kind of its foremost device, and the transition that it belongs to.
        blocks: Of each block, in the order in which they are placed, its transitions, and its rows by the node of the
            foremost device.
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
        """The rows behind ``row``: those whose foremost device is on its node, and those of other nodes."""
        if row not in self._sources:
            self._sources[row] = self._sources_of(row)
        return self._sources[row]

    def _sources_of(self, row: int) -> tuple[Rows, Rows]:
        transition = self.transition_to[row]
        assert transition is not None
        if transition.first:
            here = self._node_of[: transition.start] == self._node_of[row]
            here[0] = False
            return np.flatnonzero(here), np.flatnonzero(~here)[1:]
        near, far = transition.near[row - transition.rows.start], transition.far[row - transition.rows.start]
        return near[near > 0], far[far > 0]

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


def orders_of_blocks(costs: Costs, ordered: bool) -> tuple[list[list[Block]], bool]:
    """Orders of blocks that are looked through, and whether these are all orders of every subset of the devices.

    Args:
        costs: Whose devices they are.
        ordered: Whether the devices, each of a kind of its own, stay in their order.
    """
    everything = tuple((kind, len(each.slots)) for kind, each in enumerate(costs.kinds))
    if ordered:
        return [[(each,) for each in everything]], True
    if _states(everything) <= MOST_ROWS:
        return [[everything]], True
    return _orders_by_speed(costs), False


def _states(block: Block) -> int:
    """Number of states of a block, about."""
    return len(block) * math.prod(number + 1 for _, number in block)


def _orders_by_speed(costs: Costs) -> list[list[Block]]:
    """Orders of blocks: nodes, or the devices of one kind on a node, as they were given and by speed."""
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
