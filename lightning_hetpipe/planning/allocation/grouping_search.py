"""Search for the grouping of a cluster's devices into virtual workers: ``allocation="auto"``.

The search is over *divisions*: blocks of nodes, each made into a number of virtual workers. These take the block's
devices in turn, the fastest of each node first. If the devices of a node are equal, NP, HD and ED are divisions. NP has
a block per node, made into one virtual worker. HD has pairs of nodes, made into two. ED has all nodes, made into as
many as a node has devices. A block made into no virtual worker leaves its devices idle.

The speed of a division is its throughput without synchronisation. If waves are proportional, it is the sum of the
virtual workers' rates, else the slowest rate times their number. Equal groups of devices are planned once. A group is
not planned if even with all its devices always busy it would not help. From several divisions the search climbs by
single changes: another number of virtual workers in a block, two blocks joined, a block split into its nodes. The best
divisions are simulated with synchronisation and shared links, beside NP, ED and HD, and placed layers if they may be
faster.

The result is a local optimum near these starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeAlias

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.allocation.allocator import NEAR, Allocation, Allocator, Kinds
from lightning_hetpipe.planning.allocation.groupings import GROUPINGS, Group, Grouping
from lightning_hetpipe.planning.allocation.placed import placed

ENOUGH = 0.97
"""Fraction of the best throughput at which fewer virtual workers win: N of them act like N times the learning rate."""

PROMISING = 0.9
"""Fraction of the fastest division's throughput, without synchronisation, that is worth a simulation."""

UPHILL = 1.002
"""Smallest factor of throughput that is worth a change."""

PLANS = 30
"""Largest number of groups that are planned in the search."""

LONGEST = 16
"""Largest number of devices of a virtual worker, except in NP, ED and HD. Longer pipelines gain little, and their plans
take long to find."""

FINALISTS = 8
"""Largest number of divisions that are simulated."""


@dataclass(frozen=True, order=True)
class NodeBlock:
    """Nodes whose devices make ``parts`` virtual workers, or none if ``parts`` is 0."""

    nodes: tuple[int, ...]
    parts: int


Blocks: TypeAlias = tuple[NodeBlock, ...]

Alike: TypeAlias = tuple[int, tuple[int, ...]]
"""Number of parts of a block, and the kinds of its nodes."""


def best_allocation(
    allocator: Allocator,
    *,
    shares: bool,
    placements: Sequence[str] = ("size",),
    told: Callable[[str], None] = lambda line: None,
) -> Allocation:
    """Search for the fastest allocation.

    Of allocations within 3% of the fastest, take those with the fewest virtual workers, and of these the one with the
    least s_global. So NP, ED and HD are never faster by more than 3%, and never as fast with fewer virtual workers. If
    nothing fits, return the allocation that lacks the least memory.

    Args:
        shares: Whether faster virtual workers get longer waves.
        placements: Settings among which the placement of parameters is chosen.
        told: Called with a line about the next step of the search.

    Raises:
        SettingError: if not even all devices together can be planned as asked.
    """
    search = _GroupingSearch(allocator, shares)
    candidates = [*search.named()]
    told(f"planning groups of {len(allocator.cluster.slots)} devices on {len(allocator.cluster.nodes)} nodes")
    candidates += search.found()
    found: list[Allocation] = []
    best = 0.0
    for count, grouping in enumerate(dict.fromkeys(candidates), start=1):
        told(f"simulating grouping {count}, of {len(grouping)} virtual workers")
        fewer = all(len(grouping) < len(each.grouping) for each in found if each.rate >= ENOUGH * best)
        if found and search.rate(grouping) < (ENOUGH if fewer else 1.0) * best:
            continue  # synchronisation makes nothing faster
        for placement in placements if len(grouping) > 1 else placements[:1]:
            found.append(allocator.allocate("auto", grouping, shares=shares, placement=placement))
            best = max(best, found[-1].rate)
            if found[-1].rate >= NEAR * search.rate(grouping):
                break  # another placement gains nothing
    if "local" in placements:
        told("placing layers")
        with suppress(SettingError):
            other = placed(allocator, shares=shares, floor=best)
            found += [] if other is None else [replace(other, name="auto")]
            best = max(each.rate for each in found)
    if not best:
        return min(found, key=lambda each: (each.lacking, len(each.grouping)))
    good = [each for each in found if each.rate >= ENOUGH * best]
    return min(good, key=lambda each: (len(each.grouping), each.staleness, -each.rate))


class _GroupingSearch:
    def __init__(self, allocator: Allocator, shares: bool) -> None:
        self._allocator = allocator
        self._shares = shares
        self._numbers: dict[Kinds, int] = {}
        """Number of each kind of group, for faster lookup."""
        self._rates: dict[int, float] = {}
        self._values: dict[Blocks, float] = {}
        self._made: dict[Alike, list[tuple[Group, int]]] = {}
        cluster = allocator.cluster
        known: dict[object, int] = {}
        self._kind = [known.setdefault((node.own_link, node.devices), len(known)) for node in cluster.nodes]
        """Number of each node's kind. Equal nodes have equal numbers."""
        self._devices = [sorted(own, key=lambda slot: -allocator.speed(slot)) for own in cluster.slots_by_node]
        self._longest = min(LONGEST, len(allocator.profile.layers))

    def named(self) -> Iterator[Grouping]:
        """Yield NP, ED and HD if possible, and all devices together if they are few."""
        for group in GROUPINGS.values():
            try:
                yield group(self._allocator.cluster, self._allocator.speed)
            except SettingError:
                continue
        if len(self._allocator.cluster.slots) <= self._longest:
            yield (self._allocator.cluster.slots,)

    def found(self) -> list[Grouping]:
        """Return the best promising grouping for each number of virtual workers, the fastest first."""
        starts = sorted(dict.fromkeys(self._starts()), key=self._optimistic, reverse=True)
        for start in starts:
            self._climb(start)
        best = max(self._values, key=lambda each: self._values[each], default=None)
        if best is None or not self._values[best]:
            return []
        most = self._values[best]
        by_count: dict[int, Blocks] = {}
        for division, value in self._values.items():
            count = sum(block.parts for block in division)
            if value >= PROMISING * most and (count not in by_count or value > self._values[by_count[count]]):
                by_count[count] = division
        chosen = sorted(by_count.values(), key=lambda each: -self._values[each])[:FINALISTS]
        made = [[group for block in division for group in self._groups(block)] for division in chosen]
        # Without the groups that do not hold the model.
        return [tuple(group for group in groups if self._rate(group, self._number(group))) for groups in made]

    def rate(self, grouping: Grouping) -> float:
        """Return the minibatches per second of ``grouping`` without synchronisation."""
        plans = [self._allocator.plans.plan(group) for group in grouping]
        return self._sum([plan.rate if plan.fits else 0.0 for plan in plans])

    def _starts(self) -> Iterator[Blocks]:
        """Yield divisions of single nodes, pairs, pairs of pairs and so on, each with every number of parts."""
        strength = [sum(map(self._allocator.speed, own)) for own in self._devices]
        blocks: list[tuple[int, ...]] = [
            (node,) for node in sorted(range(len(strength)), key=lambda node: -strength[node])
        ]
        while True:
            for parts in range(1, max(map(len, self._devices)) + 1):
                nearest = [min(self._parts(nodes), key=lambda each: (abs(each - parts), each)) for nodes in blocks]
                yield self._ordered([NodeBlock(*each) for each in zip(blocks, nearest, strict=True)])
            if len(blocks) == 1:
                return
            half = (len(blocks) + 1) // 2
            rest = blocks[half:][::-1] + [()] * (2 * half - len(blocks))
            blocks = [tuple(sorted(one + other)) for one, other in zip(blocks[:half], rest, strict=True)]

    def _parts(self, nodes: Sequence[int]) -> list[int]:
        """Return the numbers of virtual workers that share the devices of ``nodes`` about equally."""
        counts = {len(self._devices[node]) for node in nodes}
        return sorted({parts for count in counts for parts in range(1, count + 1) if count % parts == 0})

    def _groups(self, block: NodeBlock) -> list[Group]:
        devices = [self._devices[node] for node in block.nodes]
        taken = [tuple(slot for own in devices for slot in own[part :: block.parts]) for part in range(block.parts)]
        return [group for group in taken if group]

    def _climb(self, at: Blocks) -> None:
        """Climb until no single change is faster. Else the paper's cluster is 10% slower with VGG-19
        (``benchmarks/paper_cluster.py``)."""
        value = self._value(at)
        while True:
            changes = sorted(self._changes(at), key=self._optimistic, reverse=True)
            for other in changes:
                if self._optimistic(other) <= value * UPHILL:
                    return
                if (found := self._value(other)) > value * UPHILL:
                    at, value = other, found
                    break
            else:
                return

    def _changes(self, division: Blocks) -> list[Blocks]:
        """Return the divisions that differ by one change. Of equivalent changes, return only one."""
        found: dict[tuple[object, ...], Blocks] = {}

        def add(gone: Sequence[NodeBlock], new: Sequence[NodeBlock]) -> None:
            key = (tuple(sorted(map(self._alike, gone))), tuple(sorted(map(self._alike, new))))
            if key not in found:
                found[key] = self._ordered([*(each for each in division if each not in gone), *new])

        for block in division:
            for parts in (0, *self._parts(block.nodes)):
                if parts != block.parts:
                    add([block], [NodeBlock(block.nodes, parts)])
            if len(block.nodes) > 1:
                for parts in (1, block.parts):
                    add([block], [NodeBlock((node,), min(parts, len(self._devices[node]))) for node in block.nodes])
        for one, other in combinations(division, 2):
            nodes = tuple(sorted((*one.nodes, *other.nodes)))
            for parts in self._parts(nodes):
                add([one, other], [NodeBlock(nodes, parts)])
        return [*found.values()]

    def _alike(self, block: NodeBlock) -> Alike:
        """Return a key that blocks of equal nodes share."""
        return block.parts, tuple(sorted(self._kind[node] for node in block.nodes))

    @staticmethod
    def _ordered(blocks: Sequence[NodeBlock]) -> Blocks:
        return tuple(sorted(blocks, key=lambda block: block.nodes))

    def _value(self, division: Blocks) -> float:
        """Return the minibatches per second without synchronisation."""
        if division not in self._values:
            self._values[division] = self._together(division, self._rate)
        return self._values[division]

    def _optimistic(self, division: Blocks) -> float:
        """Return an upper bound of :meth:`_value`: unplanned groups are as fast as their devices together."""
        return self._together(division, self._hope)

    def _together(self, division: Blocks, rate: Callable[[Group, int], float]) -> float:
        found: list[float] = []
        for block in division:
            if (key := self._alike(block)) not in self._made:
                self._made[key] = [(group, self._number(group)) for group in self._groups(block)]
            found += (rate(*made) for made in self._made[key])
        return self._sum(found)

    def _sum(self, rates: Sequence[float]) -> float:
        working = [rate for rate in rates if rate]
        return sum(working) if self._shares else len(working) * min(working, default=0.0)

    def _number(self, group: Group) -> int:
        return self._numbers.setdefault(self._allocator.plans.kinds(group), len(self._numbers))

    def _hope(self, group: Group, number: int) -> float:
        """Return the minibatches per second of one virtual worker, or an upper bound if it is not planned yet."""
        if number in self._rates:
            return self._rates[number]
        return 0.0 if len(group) > self._longest else sum(map(self._allocator.speed, group))

    def _rate(self, group: Group, number: int) -> float:
        """Return minibatches per second, or 0 if ``group`` does not hold the model or takes too long to plan."""
        if number not in self._rates:
            if len(group) > self._longest or len(self._rates) >= PLANS:
                return 0.0
            self._rates[number] = self._allocator.plans.rate(group)
        return self._rates[number]
