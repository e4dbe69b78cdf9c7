"""Orders of devices: the states of the dynamic programme, and which of them lie behind which.

A state says which devices of a block are placed, and which of them is the foremost. Devices are placed block by block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_hetpipe.planning.model.costs import Costs

MOST_ROWS = 3000
"""Largest number of states that are looked through for one block."""

Block: TypeAlias = tuple[tuple[int, int], ...]
"""Kinds and how many of each there are."""

Rows: TypeAlias = NDArray[np.intp]


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


class BlockStates(NamedTuple):
    """States of one block.

    Attributes:
        transitions: In the order in which devices are placed.
        nodes: The rows, by the node of their foremost device.
    """

    transitions: Sequence[Transition]
    nodes: Sequence[tuple[int, Rows]]


class DeviceOrder:
    """States of ``blocks``, of which the last one is placed first. Row 0 is a state that no way leads to.

    Attributes:
        stages: k, where it is given, else 1.
        kind_of, transition_to: For each row, the kind of its foremost device, and the transition that it belongs to.
        blocks: Those of each block, in the order in which they are placed.
    """

    def __init__(self, costs: Costs, blocks: Sequence[Block], stages: int) -> None:
        self.stages = stages
        self.kind_of = [-1]
        self.transition_to: list[Transition | None] = [None]
        self.blocks: list[BlockStates] = []
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
        self.blocks.append(BlockStates(transitions, nodes))


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
