"""Device order: the kind of device for each stage, so that the slowest stage can be as fast as possible.

Devices of one kind are interchangeable, so that an order is a sequence of kinds. It is built from the last stage to the
first. A *state* is what is left of each kind, and the group of the kind that was placed last. For a given T, a state
knows for each boundary b the least time of its foremost stage if that starts at b, all stages behind it take T at the
most, and every stage has room; what this stage will receive from the one before it comes on top, once that one's device
is known. Placing another device needs only that least. So an order for T is found in (states x kinds x layers) steps,
and the least T by bisection over whole ticks: exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_hetpipe.planning.model.costs import NEVER, Costs, MemoryBound, Ticks

State: TypeAlias = tuple[Any, int]
"""Remaining devices, as its rules have them, and the group of the kind that was placed last."""

Rows: TypeAlias = NDArray[np.intp]

MOST = 40_000_000
"""Largest number of states times layers that are searched for one T: some seconds."""

NEAR = 1 << 8
"""Inverse relative distance of the bounds from which on the search asks for an order better by one tick."""

ANY = NEVER // 4
"""More ticks than any stage takes."""


@dataclass(frozen=True)
class OrderedKinds:
    """The ``kinds`` of the stages' devices, from the first stage on, and a T_max in ticks that they reach."""

    kinds: tuple[int, ...]
    bottleneck: int


class Rules:
    """Rules of the order of devices. ``start`` is what is left before any is placed."""

    start: Any

    def __init__(self, costs: Costs) -> None:
        raise NotImplementedError

    def next(self, state: State) -> Iterable[tuple[int, Any]]:
        """The kinds that may stand before ``state``, and what is left then."""
        raise NotImplementedError


class AnyOrder(Rules):
    """Every order; as many of each kind as there are."""

    def __init__(self, costs: Costs) -> None:
        self.start = tuple(len(kind.slots) for kind in costs.kinds)

    def next(self, state: State) -> Iterator[tuple[int, Any]]:
        left = state[0]
        for kind, count in enumerate(left):
            if count:
                yield kind, (*left[:kind], count - 1, *left[kind + 1 :])


class NodesTogether(AnyOrder):
    """Every order in which those of a group, such as a node, stand together."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self._groups = [kind.group for kind in costs.kinds]

    def next(self, state: State) -> Iterator[tuple[int, Any]]:
        left, group = state
        others = tuple(0 if own == group else count for own, count in zip(self._groups, left, strict=True))
        for kind, own in enumerate(self._groups):
            rest = left if own == group or left == self.start else others
            if rest[kind]:
                yield kind, (*rest[:kind], rest[kind] - 1, *rest[kind + 1 :])


class GivenOrder(Rules):
    """The order of the kinds, one device each; some may be left out."""

    def __init__(self, costs: Costs) -> None:
        self.start = len(costs.kinds)

    def next(self, state: State) -> Iterator[tuple[int, Any]]:
        for kind in range(state[0]):
            yield kind, kind


class FixedOrder(Rules):
    """The order of ``kinds``, from the first stage on; some of the first may be left out."""

    def __init__(self, kinds: Sequence[int]) -> None:
        self.start = tuple(kinds)

    def next(self, state: State) -> Iterator[tuple[int, Any]]:
        if left := state[0]:
            yield left[-1], left[:-1]


class TooMany(Exception):
    """There are more states than can be looked through."""


@dataclass(frozen=True)
class _Placements:
    """Placements of a device of ``kind`` before the states of one depth, sorted by the devices that are left then.

    Attributes:
        kind: Of the device.
        behind: The row of the state behind each placement.
        groups: The group of that state's foremost device, by its position among all groups.
        first: The first placement for each rest of devices.
        after: The row of the next depth for each rest of devices.
    """

    kind: int
    behind: Rows
    groups: Rows
    first: Rows
    after: Rows


class DeviceOrders:
    """Orders that ``rules`` allow for stages with ``costs``; of so many ``stages``, unless that is None.

    Raises:
        TooMany: where there are too many states to look through.
    """

    def __init__(self, costs: Costs, rules: Rules, stages: int | None = None) -> None:
        self.costs = costs
        self.stages = stages
        self._rules = rules
        self._groups = [kind.group for kind in costs.kinds]
        each = sorted(set(self._groups))
        self._hops = {group: np.stack([costs.hop(group, other) for other in each]) for group in each}
        rows: dict[State, int] = {}
        self._last = [
            (kind, rows.setdefault((left, self._groups[kind]), len(rows)))
            for kind, left in rules.next((rules.start, -1))
        ]
        self._depths = [rows]
        self._placements: list[list[_Placements]] = []
        while len(self._depths) != stages:
            placements, rows = self._before(rows)
            if not rows:
                break
            self._placements.append(placements)
            self._depths.append(rows)
            if sum(map(len, self._depths)) * (costs.layers + 1) > MOST:
                raise TooMany

    def find(self, most: int, bound: MemoryBound) -> OrderedKinds | None:
        """Stages, as few as there can be, that take ``most`` ticks each at the most; None if none do."""
        n = self.costs.layers
        own = np.full((len(self._depths[0]), n + 1), NEVER)
        for kind, row in self._last:
            before = self.costs.before_last[kind]
            take = before[-1] - before
            reach = bound.reach(kind, 0)
            fits = take <= most if reach is None else (take <= most) & (reach == n)
            own[row] = np.minimum(own[row], np.where(fits, take, NEVER))
        own[:, n] = NEVER
        found = [own]
        for depth in range(len(self._depths)):
            if self.stages in (None, depth + 1) and (found[-1][:, 0] <= most).any():
                return self._trace(found, most, bound)
            if depth == len(self._placements) or not (found[-1] <= most).any():
                return None
            found.append(self._placed(found[-1], depth, most, bound))
        return None

    def _placed(self, behind: Ticks, depth: int, most: int, bound: MemoryBound) -> Ticks:
        costs = self.costs
        own = np.full((len(self._depths[depth + 1]), costs.layers + 1), NEVER)
        for each in self._placements[depth]:
            hops = self._hops[self._groups[each.kind]][each.groups]
            take = np.where(behind[each.behind] <= most - hops, costs.before[each.kind] + hops, NEVER)
            ends = np.minimum.reduceat(take, each.first)
            starts = self._starts(ends, each.kind, depth + 1, most, bound)
            own[each.after] = np.minimum(own[each.after], starts)
        return own

    def _before(self, rows: dict[State, int]) -> tuple[list[_Placements], dict[State, int]]:
        """Placements of one more device before the states ``rows``, and the states that there are then."""
        by_kind: dict[int, dict[Any, list[tuple[int, int]]]] = {}
        for state, row in rows.items():
            for kind, left in self._rules.next(state):
                by_kind.setdefault(kind, {}).setdefault(left, []).append((row, state[1]))
        after: dict[State, int] = {}
        placements = []
        position = {group: index for index, group in enumerate(self._hops)}
        for kind, by_rest in by_kind.items():
            pairs = [(row, position[group]) for each in by_rest.values() for row, group in each]
            first = np.cumsum([0, *map(len, by_rest.values())])[:-1]
            targets = [after.setdefault((left, self._groups[kind]), len(after)) for left in by_rest]
            behind, groups = np.array(pairs).T
            placements.append(_Placements(kind, behind, groups, first, np.array(targets)))
        return placements, after

    def _starts(self, ends: Ticks, kind: int, distance: int, most: int, bound: MemoryBound) -> Ticks:
        """Least ticks of a stage by its start, over all ends that it may have."""
        before = self.costs.before[kind]
        reach = bound.reach(kind, distance)
        least = np.full_like(ends, NEVER)
        longest = np.searchsorted(before, before + most, side="right") - 1
        if reach is None or (reach >= longest).all():
            least[:, :-1] = np.minimum.accumulate(ends[:, :0:-1], axis=1)[:, ::-1]
        else:
            _least_within(ends, np.minimum(reach, longest), least)
        take = least - before
        take[take > most] = NEVER
        return take

    def _trace(self, found: Sequence[Ticks], most: int, bound: MemoryBound) -> OrderedKinds:
        """The way to a state whose foremost stage starts at 0."""
        row, start = int(np.argmin(found[-1][:, 0])), 0
        kinds, splits = [], [0]
        for depth in range(len(found) - 1, 0, -1):
            here, take = list(self._depths[depth])[row], int(found[depth][row, start])
            kind, row, start = next(
                (kind, source, end)
                for state, source in self._depths[depth - 1].items()
                for kind, left in self._rules.next(state)
                if (left, self._groups[kind]) == here
                for end in [self._end(found[depth - 1][source], kind, state[1], start, depth, take, most, bound)]
                if end is not None
            )
            kinds.append(kind)
            splits.append(start)
        take, before = int(found[0][row, start]), self.costs.before_last
        kinds.append(next(k for k, place in self._last if place == row and before[k][-1] - before[k][start] == take))
        bottleneck = self.costs.bottleneck(kinds, splits)
        assert bottleneck <= most, "what was found takes what was asked for"
        return OrderedKinds(tuple(kinds), bottleneck)

    def _end(
        self, behind: Ticks, kind: int, group: int, start: int, distance: int, take: int, most: int, bound: MemoryBound
    ) -> int | None:
        """End of the stage before ``behind``, if it starts at ``start`` and takes ``take`` ticks."""
        reach, before = bound.reach(kind, distance), self.costs.before[kind]
        hop = self.costs.hop(self.costs.kinds[kind].group, group)
        last = self.costs.layers if reach is None else int(reach[start])
        window = slice(start + 1, last + 1)
        good = (behind[window] <= most - hop[window]) & (before[window] + hop[window] - before[start] == take)
        ends = np.flatnonzero(good)
        return start + 1 + int(ends[0]) if len(ends) else None


def _least_within(values: Ticks, last: Ticks, least: Ticks) -> None:
    """Set ``least`` at b to the least of ``values`` from b + 1 to ``last[b]``, where there are any.

    From a table of the least of 1, 2, 4, ... neighbours, of which two cover any window.
    """
    counts = last - np.arange(len(last))
    level, width, table = 0, 1, values
    while (at := np.flatnonzero(counts >= width)).size:
        if level:
            half = width // 2
            table = np.minimum(table[:, :-half], table[:, half:])
        at = at[counts[at] < 2 * width]
        least[:, at] = np.minimum(table[:, at + 1], table[:, last[at] - width + 1])
        level, width = level + 1, 2 * width


def least_bottleneck(orders: DeviceOrders, bound: MemoryBound, at_least: int = 0) -> OrderedKinds | None:
    """Find the order with the least T_max, by bisection; None if no stages have room.

    Whenever an order is found, its own least T_max is looked for first, which is 30 times cheaper than all orders. The
    best of an order is often the best of all, so that near the lower bound that is asked before the middle.

    Args:
        orders: Those to choose from.
        bound: Memory of each device.
        at_least: Ticks known as a lower bound.
    """
    low = max(at_least, _bound(orders.costs)) - 1  # nothing is as fast as this
    found, best, halve = orders.find(ANY, bound), None, False
    while True:
        if found is not None:
            best = _best_of_order(orders, bound, low, found)
        if best is None or low + 1 >= best.bottleneck:
            return best
        middle = (low + best.bottleneck) // 2
        halve = best.bottleneck - low > low // NEAR or not halve
        most = middle if halve else best.bottleneck - 1
        found = orders.find(most, bound)
        if found is None:
            low = most


def _best_of_order(orders: DeviceOrders, bound: MemoryBound, low: int, best: OrderedKinds) -> OrderedKinds:
    """Lower the T_max of ``best`` as far as its own order allows, where more than ``low`` ticks are needed."""
    own = DeviceOrders(orders.costs, FixedOrder(best.kinds), orders.stages)
    while low + 1 < best.bottleneck:
        middle = (low + best.bottleneck) // 2
        found = own.find(middle, bound)
        low, best = (middle, best) if found is None else (low, found)
    return best


def _bound(costs: Costs) -> int:
    """Lower bound of T_max in ticks: of the longest layer, and if work could be divided at will."""
    takes = np.array([np.diff(before) for before in costs.before_last])
    longest = int(takes.min(axis=0).max())
    work = takes.mean(axis=0)
    if not work.all():
        return longest
    # A device of this kind takes no less than so many ticks for a tick of work, whichever layers it gets.
    slowness = (takes / work).min(axis=1)
    if not slowness.all():
        return longest
    speed = sum(len(kind.slots) / slow for kind, slow in zip(costs.kinds, slowness, strict=True))
    return max(longest, int(work.sum() / speed * (1 - 1e-9)))
