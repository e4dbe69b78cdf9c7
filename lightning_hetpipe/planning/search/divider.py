"""Division of the layers among devices: their order, those that are left out, and the split points.

The *period* of a division bounds the seconds for each minibatch from below: at Nm in flight it is T_max, or the sum of
all stages' times divided by Nm, whichever is more. Divisions with the least period, or with a period below a limit, are
found by dynamic programming from the last stage to the first. It looks for the least sum of times at which no stage
takes more than a given time, over (devices left, device placed last, boundary at which that one starts).

Devices are placed block by block. If there are few states, all are one block, and every order of every subset is looked
through (``exact``). Otherwise blocks are nodes, or the devices of one kind on a node, in several orders: by memory, by
speed. Any order is looked through within a block, and any devices of any block may be left out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_hetpipe.planning.model.cluster import Device
from lightning_hetpipe.planning.model.costs import Costs, Floats

MOST_ROWS = 3000
"""Largest number of states that are looked through for one block."""

MOST_BOUNDARIES = 128
"""Number of boundaries between layers above which only some are looked at, and then all near those that were chosen."""

CELLS = 1 << 20
"""Numbers that are worked on at once."""

CLOSE = 1.001
"""Ratio of an upper and a lower bound of the least period at which the search for it ends."""

Block: TypeAlias = tuple[tuple[int, int], ...]
"""Kinds and how many of each there are."""

Rows: TypeAlias = NDArray[np.intp]

Fits: TypeAlias = NDArray[np.bool_]

LINKS = range(2)
"""Within a node, and across nodes."""

INSTANT = 1e-12
"""Seconds that count as none."""

SLIGHT = 1e-5
"""Part of the time of all layers that the square of their bytes counts as, so that of divisions as fast one with few
bytes on each device is the best."""

FARTHER, FAR = 1.02, 1 << 10
"""Ratio to a lower bound of the least period that is looked at next, and one at which such a bound says little."""


@dataclass(frozen=True)
class Room:
    """Room of the devices for stages, by their boundaries.

    Attributes:
        fits: For a kind of device, whether a stage has room on it; the same for the last stage.
        before: Bytes of all stages but the last one.
        last: Bytes of the last one.
    """

    fits: Callable[[int], tuple[Fits, Fits]]
    before: Floats
    last: Floats


@dataclass(frozen=True)
class Division:
    """Layers divided among devices.

    Attributes:
        kinds: The kind of each stage's device.
        splits: The first layer of each stage.
        takes: Seconds of each stage.
    """

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
        """Lower bound of the seconds for each minibatch; ``synchronise`` is what each wave's end waits."""
        return max(self.bottleneck, (sum(self.takes) + synchronise) / in_flight)


@dataclass(frozen=True)
class _Step:
    """States that are reached by placing devices of ``kind``.

    Attributes:
        rows: Those states.
        near, far: For each of them the states behind it, whose foremost device is on the same node or on another,
            padded with row 0.
        block: The first row of the block.
        first: Whether it places the first device of a block, so that any state of the blocks behind lies behind it.
    """

    kind: int
    rows: slice
    near: Rows
    far: Rows
    block: int
    first: bool


class _Order:
    """States of ``blocks``, of which the last one is placed first. Row 0 is a state that no way leads to.

    Attributes:
        stages: k, where it is given, else 1.
        kind_of, step_of: For each row, the kind of its foremost device, and the step that it belongs to.
        steps: In the order in which they are placed.
    """

    def __init__(self, costs: Costs, blocks: Sequence[Block], stages: int) -> None:
        self.stages = stages
        self.kind_of = [-1]
        self.step_of: list[_Step | None] = [None]
        self.steps: list[_Step] = []
        self._node = [kind.node for kind in costs.kinds]
        for block in reversed(blocks):
            self._add(block)
        self._node_of = np.array([-1, *(self._node[kind] for kind in self.kind_of[1:])])

    def sources(self, row: int) -> tuple[Rows, Rows]:
        """The rows behind ``row``: those whose foremost device is on its node, and those of other nodes."""
        step = self.step_of[row]
        assert step is not None
        if step.first:
            here = self._node_of[: step.block] == self._node_of[row]
            here[0] = False
            return np.flatnonzero(here), np.flatnonzero(~here)[1:]
        near, far = step.near[row - step.rows.start], step.far[row - step.rows.start]
        return near[near > 0], far[far > 0]

    def by_node(self, start: int, stop: int) -> list[tuple[int, Rows]]:
        """The rows from ``start`` to ``stop``, by the node of their foremost device."""
        nodes = self._node_of[start:stop]
        return [(int(node), start + np.flatnonzero(nodes == node)) for node in np.unique(nodes)]

    def _add(self, block: Block) -> None:
        start = len(self.kind_of)
        rows: dict[tuple[tuple[int, ...], int], int] = {}
        levels: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for counts in product(*(range(number + 1) for _, number in block)):
            for place, number in enumerate(counts):
                if number:
                    levels.setdefault((sum(counts), place), []).append(counts)
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
            step = _Step(kind, there, _padded(near), _padded(far), start, level == 1)
            self.steps.append(step)
            self.step_of += [step] * (there.stop - first)


def _padded(lists: Sequence[Sequence[int]]) -> Rows:
    width = max(1, *map(len, lists))
    return np.array([[*each, *[0] * (width - len(each))] for each in lists], dtype=np.intp)


class Divider:
    """Divider of the layers among the devices of ``costs``.

    Args:
        costs: Seconds of stages.
        stages: k, where it is given.
        ordered: Whether the devices, each of a kind of its own, stay in their order.

    Attributes:
        exact: Whether every order of every subset is looked through.
        twins: Nodes that may change places.
    """

    def __init__(self, costs: Costs, stages: int | None = None, ordered: bool = False) -> None:
        self.costs = costs
        everything = tuple((kind, len(each.slots)) for kind, each in enumerate(costs.kinds))
        self.exact = ordered or _size(everything) <= MOST_ROWS
        orders: list[list[Block]] = [[everything]]
        if ordered:
            orders = [[(each,) for each in everything]]
        elif not self.exact:
            orders = _block_orders(costs)
        self._orders = [_Order(costs, blocks, stages or 1) for blocks in orders]
        self._shift = int(stages is not None)
        self.twins = Twins(costs, ordered)
        self._slowest = self._bound()
        self._gap = max(1, -(-costs.layers // MOST_BOUNDARIES))
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
        takes = self._takes(room, self._boundaries)
        for order in self._orders:
            self._bisect(found, order, takes, in_flight, synchronise, low)
        high = math.inf
        while found and len(self._boundaries) <= self.costs.layers and min(found.values()) * CLOSE < high:
            best = min(found, key=found.__getitem__)
            high = found[best]
            order = _Order(self.costs, self._around(best.kinds), self._orders[0].stages)
            takes = self._takes(room, self._near(best.splits))
            self._bisect(found, order, takes, in_flight, synchronise, low)
        latest = [*found][::-1]
        return sorted(latest, key=found.__getitem__)

    def _bisect(
        self,
        found: dict[Division, float],
        order: _Order,
        takes: Sequence[_Takes],
        in_flight: int,
        synchronise: float,
        low: float,
    ) -> None:
        """Add divisions in ``order`` with smaller periods than those that were ``found``; none is below ``low``."""
        high = before = min(found.values(), default=math.inf)
        farther = FARTHER
        cap = min(low * farther if low else math.inf, high / CLOSE)
        low = max(low, self._slowest)
        while True:
            division = self._ways(order, takes, cap).best()
            if division is not None:
                division = replace(division, kinds=self.twins.first(division.kinds))
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
        if high < before and (division := self._ways(order, takes, high).best()) is not None:
            # Of those as fast the one with few bytes, where the way here came by another.
            division = replace(division, kinds=self.twins.first(division.kinds))
            found.pop(division, None)
            found[division] = division.period(in_flight, synchronise)

    def fastest(self, cap: float, room: Room) -> list[Division]:
        """The division of each order with the least sum of times whose stages take ``cap`` seconds at the most."""
        takes = self._takes(room, self._boundaries)
        found = (self._ways(order, takes, cap).best() for order in self._orders)
        return [division for division in found if division is not None]

    def within(self, period: float, in_flight: int, room: Room, synchronise: float = 0.0) -> Iterator[Division]:
        """Yield the divisions whose period is ``period`` at the most, those with a small sum of times first."""
        takes = self._takes(room, self._boundaries)
        most = (period * in_flight - synchronise) * (1 + 2 * SLIGHT)
        twins = self.twins if self.exact else None
        ways = (self._ways(order, takes, period).within(most, twins) for order in self._orders)
        for division in heapq.merge(*ways, key=lambda division: sum(division.takes)):
            if division.period(in_flight, synchronise) <= period * (1 + 1e-9):
                yield replace(division, kinds=self.twins.first(division.kinds))

    def _takes(self, room: Room, boundaries: Rows) -> list[_Takes]:
        """Seconds of stages on each kind; one for those that only differ in their node."""
        known: dict[tuple[Device, int], _Takes] = {}
        found = []
        for index, kind in enumerate(self.costs.kinds):
            key = kind.device, id(self.costs.within[kind.node])
            found.append(known.get(key) or known.setdefault(key, _Takes.of(self.costs, index, room, boundaries)))
        return found

    def _ways(self, order: _Order, takes: Sequence[_Takes], cap: float) -> _Ways:
        known = {id(each): each.within(cap) for each in takes}
        return _Ways(self.costs, order, [known[id(each)] for each in takes], self._shift)

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

    def _bound(self) -> float:
        """Lower bound of T_max: of the longest layer, and if work could be divided at will."""
        takes = np.array([np.diagonal(own, 1) for own in self.costs.own_last])
        longest, work = float(takes.min(axis=0).max()), takes.mean(axis=0)
        if not work.all():
            return longest
        # A device of this kind takes no less than so much for each unit of work, whichever layers it gets.
        slowness = (takes / work).min(axis=1)
        if not slowness.all():
            return longest
        speed = sum(len(kind.slots) / slow for kind, slow in zip(self.costs.kinds, slowness, strict=True))
        return max(longest, float(work.sum() / speed) * (1 - 1e-9))


class Twins:
    """Nodes with the same devices and the same link, which may change places, unless devices are ``ordered``."""

    def __init__(self, costs: Costs, ordered: bool = False) -> None:
        nodes: dict[int, dict[Device, int]] = {node: {} for node in costs.within}
        for index, kind in enumerate(costs.kinds):
            nodes[kind.node][kind.device] = index
        likes: dict[object, list[int]] = {}
        for node, own in nodes.items():
            devices = frozenset((device, len(costs.kinds[kind].slots)) for device, kind in own.items())
            likes.setdefault((devices, id(costs.within[node])), []).append(node)
        self._nodes = [kind.node for kind in costs.kinds]
        self._likes = {node: those for those in likes.values() for node in those}
        self._kinds = [{node: nodes[node][kind.device] for node in self._likes[kind.node]} for kind in costs.kinds]
        self._any = len(likes) < len(nodes) and not ordered

    def first(self, kinds: tuple[int, ...]) -> tuple[int, ...]:
        """Let nodes change places so that of those that are alike the first ones are used first."""
        if not self._any:
            return kinds
        place: dict[int, int] = {}
        used: dict[int, int] = {}
        for kind in kinds:
            if (node := self._nodes[kind]) not in place:
                those = self._likes[node]
                place[node] = those[used.get(those[0], 0)]
                used[those[0]] = used.get(those[0], 0) + 1
        return tuple(self._kinds[kind][place[self._nodes[kind]]] for kind in kinds)


class _Ways:
    """Ways to place stages that take ``takes``: for each state and boundary the least sum.

    Of each state there are two sums, for a link to the stage before that is within the node (0) or across nodes (1).
    """

    def __init__(self, costs: Costs, order: _Order, takes: Sequence[_Takes], shift: int) -> None:
        self._costs, self._order, self._takes, self._shift = costs, order, takes, shift
        self._boundaries = takes[0].boundaries
        shape = len(LINKS), order.stages, len(order.kind_of), len(self._boundaries)
        self._least = np.full(shape, np.inf)
        nodes = {node: place for place, node in enumerate(costs.within)}
        behind = np.full((len(nodes), *shape[:2], shape[3]), np.inf)  # by the node of the foremost device
        block = 1
        for step in order.steps:
            if step.block != block:  # those of the block behind may lie behind any of this one
                for node, rows in order.by_node(block, step.block):
                    behind[nodes[node]] = np.minimum(behind[nodes[node]], self._least[:, :, rows].min(axis=2))
                block = step.block
            if step.first:
                here = nodes[costs.kinds[step.kind].node]
                self._least[:, 0, step.rows] = takes[step.kind].last[:, None]
                sources = [behind[here, 0][:, None]]
                if len(nodes) > 1:
                    sources.append(np.delete(behind, here, axis=0)[:, 1].min(axis=0)[:, None])
            else:
                sources = [self._least[link][:, rows].min(axis=2) for link, rows in enumerate((step.near, step.far))]
            for link, each in enumerate(sources):
                self._place(step, link, each)

    def _place(self, step: _Step, link: int, behind: Floats) -> None:
        """Place the devices of ``step`` before ``behind``, (stages, rows, n + 1)."""
        for depth in range(self._order.stages - self._shift):
            if np.isfinite(behind[depth]).any():
                found = self._least[:, depth + self._shift, step.rows]
                np.minimum(found, self._takes[step.kind].least(behind[depth], link), out=found)

    def best(self) -> Division | None:
        """The division with the least sum of times; None if there is none."""
        at = next(self._starts(math.inf), None)
        while at is not None and at.row:
            at = next(self._behind(at, math.inf))
        return None if at is None else self._division(at)

    def within(self, total: float, twins: Twins | None) -> Iterator[Division]:
        """Yield divisions whose times sum up to ``total`` at the most, the least sums first.

        Of those that differ in ``twins`` alone, if these are given, it yields one.
        """
        ticket = count(step=-1)  # of equal sums the latest first, as that is nearer to its end
        heap: list[tuple[float, int, _Partial, Iterator[_Partial]]] = []

        if not 0 < total < math.inf:
            return

        def push(those: Iterator[_Partial]) -> None:
            for at in those:
                if twins is None or twins.first(at.kinds) == at.kinds:
                    heapq.heappush(heap, (round(at.sum / total, 9), next(ticket), at, those))
                    break

        push(self._starts(total * (1 + 1e-9)))
        while heap:
            *_, at, others = heapq.heappop(heap)
            push(others)
            if at.row:
                push(self._behind(at, total * (1 + 1e-9)))
            else:
                yield self._division(at)

    def _division(self, at: _Partial) -> Division:
        return Division.of(self._costs, at.kinds, self._boundaries[[*at.splits]].tolist())

    def _starts(self, total: float) -> Iterator[_Partial]:
        """Yield foremost stages, those first with which the least sum is smallest; it is ``total`` at the most."""
        depth = self._order.stages - 1
        starts = self._least[0, depth, :, 0]
        rows = np.flatnonzero((starts <= total) & np.isfinite(starts))
        for row in rows[starts[rows].argsort()].tolist():
            yield _Partial(float(starts[row]), 0.0, row, 0, depth, (self._order.kind_of[row],), (0,))

    def _behind(self, at: _Partial, total: float) -> Iterator[_Partial]:
        """Yield what may stand behind the last stage of ``at``, as :meth:`_starts` does."""
        takes, first, step = self._takes[at.kinds[-1]], at.splits[-1], self._order.step_of[at.row]
        assert step is not None
        depth = at.depth - self._shift
        rows: list[Rows] = [np.zeros(1, dtype=np.intp)]  # none behind
        links, widths, so_far, behind = [rows[0]], [rows[0]], [np.full(1, np.inf)], [np.zeros(1)]
        if step.first and not (self._shift and at.depth):
            so_far = [at.so_far + takes.last[at.link, first : first + 1]]
        for link, sources in enumerate(self._order.sources(at.row) if depth >= 0 else ()):
            stage = takes.stage[link, at.link, first, : len(self._boundaries) - 1 - first]
            shape = len(sources), len(stage)
            rows.append(np.repeat(sources, len(stage)))
            links.append(np.full(shape[0] * shape[1], link))
            widths.append(np.broadcast_to(np.arange(len(stage)), shape).ravel())
            so_far.append(np.broadcast_to(at.so_far + stage, shape).ravel())
            behind.append(self._least[link, depth, sources, first + 1 : first + 1 + len(stage)].ravel())
        all_rows, all_links, all_widths, all_so_far = (np.concatenate(each) for each in (rows, links, widths, so_far))
        sums = all_so_far + np.concatenate(behind)
        good = np.flatnonzero((sums <= total) & np.isfinite(sums))
        for index in good[sums[good].argsort(kind="stable")].tolist():
            row, kinds, splits = int(all_rows[index]), at.kinds, at.splits
            if row:
                kinds, splits = (*kinds, self._order.kind_of[row]), (*splits, first + 1 + int(all_widths[index]))
            yield _Partial(
                float(sums[index]), float(all_so_far[index]), row, int(all_links[index]), depth, kinds, splits
            )


class _Partial(NamedTuple):
    """The first stages of a division.

    Attributes:
        sum: The least sum of times of all stages.
        so_far: Seconds of all but the last of these stages.
        row: The state whose foremost stage that is; 0 once all stages are there.
        link: The link to the stage before it.
        depth: Stages that are still to come, where k is given.
        kinds, splits: Of these stages.
    """

    sum: float
    so_far: float
    row: int
    link: int
    depth: int
    kinds: tuple[int, ...]
    splits: tuple[int, ...]


@dataclass(frozen=True)
class _Takes:
    """Seconds of stages on one kind of device, and slightly more for their bytes; infinite where they may not be.

    Attributes:
        stage: By the link to the stage behind and by that to the one before, by the first boundary and by how many
            boundaries lie between that and the last one.
        last: Of the last stage, by the link to the stage before and by its first boundary.
        ends: The last boundary, by the first one and by how many lie between them.
        boundaries: Those that are looked at; others are given as places among them.
    """

    stage: Floats
    last: Floats
    ends: Rows
    boundaries: Rows

    @classmethod
    def of(cls, costs: Costs, kind: int, room: Room, boundaries: Rows) -> _Takes:
        """Seconds where there is ``room``."""
        hops = np.stack([costs.within[costs.kinds[kind].node], costs.across])[:, boundaries]
        fits, fits_last = room.fits(kind)
        slight = SLIGHT * min(float(own[0, -1]) for own in costs.own)
        before, behind = (each / max(1.0, float(room.before[0, -1])) for each in (room.before, room.last))
        most = len(boundaries) - 1
        ends = np.arange(most + 1)[:, None] + 1 + np.arange(most)
        inside, ends = ends <= most, np.minimum(ends, most)
        chosen = boundaries[:, None], boundaries[ends]
        own = np.where(inside & fits[chosen], costs.own[kind][chosen] + slight * before[chosen] ** 2, np.inf)
        stage = own + hops[:, ends][:, None] + hops[None, :, :, None]
        own_last = costs.own_last[kind][boundaries, -1] + slight * behind[boundaries, -1] ** 2
        last = np.where(fits_last[boundaries, -1], own_last + hops, np.inf)
        return cls(stage, last, ends, boundaries)

    def within(self, cap: float) -> _Takes:
        """Those that take ``cap`` seconds at the most."""
        cap *= 1 + 2 * SLIGHT
        stage = np.where(self.stage <= cap, self.stage, np.inf)
        finite = np.flatnonzero(np.isfinite(stage).any(axis=(0, 1, 2)))
        width = int(finite[-1]) + 1 if len(finite) else 1
        last = np.where(self.last <= cap, self.last, np.inf)
        return _Takes(stage[..., :width], last, self.ends[:, :width], self.boundaries)

    def least(self, behind: Floats, link: int) -> Floats:
        """Least sums of a stage and of what lies ``behind`` it, (rows, n + 1), by the link to the stage before and by
        the first boundary."""
        stage = self.stage[link]
        found = np.empty((len(LINKS), *behind.shape))
        step = max(1, CELLS // stage.size)
        for first in range(0, len(behind), step):
            rows = slice(first, first + step)
            found[:, rows] = (behind[rows][None, :, self.ends] + stage[:, None]).min(axis=3)
        return found


def _size(block: Block) -> int:
    """Number of states of a block, about."""
    return len(block) * math.prod(number + 1 for _, number in block)


def _block_orders(costs: Costs) -> list[list[Block]]:
    """Orders of blocks: nodes, or the devices of one kind on a node, by what they have."""
    by_kind: list[Block] = [((kind, len(each.slots)),) for kind, each in enumerate(costs.kinds)]
    by_node: list[Block] = []
    for node in costs.within:
        own = tuple((kind, len(each.slots)) for kind, each in enumerate(costs.kinds) if each.node == node)
        by_node += [own] if _size(own) <= MOST_ROWS else [(each,) for each in own]

    def memory(block: Block) -> float:
        sizes = [costs.kinds[kind].device.memory or math.inf for kind, number in block for _ in range(number)]
        return sum(sizes) / len(sizes)

    def slowness(block: Block) -> float:
        seconds = [float(costs.own_last[kind][0, -1]) for kind, number in block for _ in range(number)]
        return sum(seconds) / len(seconds)

    keys: list[Callable[[Block], float]] = [lambda block: 0.0, memory, slowness]
    orders = []
    for blocks in (by_node, by_kind):
        for key in keys:
            found = sorted(blocks, key=key)
            for each in (found, found[::-1]):
                if each not in orders:
                    orders.append(each)
    return orders
