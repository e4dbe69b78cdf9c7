"""Dynamic programme for the least sum of times of all stages, which are placed from the last one to the first.

Its states are those of :mod:`~lightning_hetpipe.planning.search.device_orders`, with the boundary at which the foremost
stage starts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from lightning_hetpipe.planning.model.costs import Costs, Division, Floats, Room
from lightning_hetpipe.planning.search.device_orders import DeviceOrder, Rows, Transition

CELLS = 1 << 20
"""Numbers that are worked on at once."""

FEW = 24
"""Number of states up to which sums are faster with the widths of stages before their first boundaries."""

LONGEST = sys.float_info.max
"""Seconds of what is possible."""

LINKS = range(2)
"""Within a node, and across nodes."""

Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The kind of each stage's device, and the place of its first boundary among those that are looked at."""


@dataclass(frozen=True)
class StageTakes:
    """Seconds of stages on one kind of device; infinite where they have no room.

    Attributes:
        stage: By the link to the stage behind and by that to the one before, by how many boundaries lie between the
            first and the last one, and by the first one.
        last: Of the last stage, by the link to the stage before and by its first boundary.
        shortest: The least of all in ``stage`` with as many boundaries between the first and the last one.
        ends: The last boundary, by how many lie between it and the first one, and by the first one.
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
        fits, fits_last = room(kind)
        most = len(boundaries) - 1
        ends = np.arange(most + 1) + 1 + np.arange(most)[:, None]
        inside, ends = ends <= most, np.minimum(ends, most)
        chosen = boundaries, boundaries[ends]
        own = np.where(inside & fits[chosen], costs.own[kind][chosen], np.inf)
        stage = own + hops[:, ends][:, None] + hops[None, :, None, :]
        last = np.where(fits_last[boundaries, -1], costs.own_last[kind][boundaries, -1] + hops, np.inf)
        return cls(stage, last, stage.min(axis=(0, 1, 3)), ends, boundaries)

    def within(self, cap: float) -> StageTakes:
        """Those that take ``cap`` seconds at the most."""
        short = np.flatnonzero(self.shortest <= cap)
        width = slice(int(short[-1]) + 1 if len(short) else 1)
        stage = self.stage[:, :, width]
        return StageTakes(
            np.where(stage <= cap, stage, np.inf),
            np.where(self.last <= cap, self.last, np.inf),
            self.shortest[width],
            self.ends[width],
            self.boundaries,
        )

    def least(self, behind: Floats, link: int) -> Floats:
        """Least sums of a stage and of what lies ``behind`` it, (rows, n + 1), by the link to the stage before and by
        the first boundary."""
        if len(behind) <= FEW:
            found: Floats = np.minimum.reduce(behind.take(self.ends, axis=1) + self.stage[link][:, None], axis=2)
            return found
        stage, ends = self._by_start
        found = np.empty((len(LINKS), *behind.shape))
        step = max(1, CELLS // stage[link].size)
        for first in range(0, len(behind), step):
            rows = slice(first, first + step)
            found[:, rows] = (behind[rows][None, :, ends] + stage[link][:, None]).min(axis=3)
        return found

    @cached_property
    def _by_start(self) -> tuple[Floats, Rows]:
        """``stage`` and ``ends`` with the first boundary before the width, which is faster for many rows."""
        return np.ascontiguousarray(self.stage.swapaxes(2, 3)), np.ascontiguousarray(self.ends.T)


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
        for block in order.blocks:
            for transition in block.transitions:
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
            for node, own in block.nodes:  # any of these may lie behind any of the blocks to come
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
            for kinds, places in self._from(row, 0, 0, self._order.stages - 1, min(total, LONGEST)):
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
            own = takes.stage[behind, link, : len(self._boundaries) - 1 - first, first]
            sums = own + self._least[behind, depth - self._shift, sources, first + 1 : first + 1 + len(own)]
            rows, ends = (sums <= left).nonzero()
            parts = sums[rows, ends], own[ends], sources[rows], ends + first + 1
            found += ((*each, behind) for each in zip(*(part.tolist() for part in parts), strict=True))
        for _, own, source, end, behind in sorted(found):
            for kinds, places in self._from(source, behind, end, depth - self._shift, left - own):
                yield (kind, *kinds), (first, *places)
