"""Dynamic programme for the least sum of times of all stages, which are placed from the last one to the first.

Its states are those of :mod:`~lightning_hetpipe.planning.search.device_orders`, with the boundary at which the foremost
stage starts.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from lightning_hetpipe.planning.model.costs import Costs, Division, Floats, Room
from lightning_hetpipe.planning.search.device_orders import DeviceOrder, Rows, Transition, Twins

CELLS = 1 << 20
"""Numbers that are worked on at once."""

FEW = 24
"""Number of states up to which sums are faster with the widths of stages before their first boundaries."""

LONGEST = sys.float_info.max
"""Seconds of what is possible."""

LINKS = range(2)
"""Within a node, and across nodes."""

SLIGHT = 1e-5
"""Part of the time of all layers that the square of their bytes counts as, so that of divisions as fast one with few
bytes on each device is the best."""


@dataclass(frozen=True)
class StageTakes:
    """Seconds of stages on one kind of device, and slightly more for their bytes; infinite where they may not be.

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
        fits, fits_last = room.fits(kind)
        slight = SLIGHT * min(float(own[0, -1]) for own in costs.own)
        before, behind = (each / max(1.0, float(room.before[0, -1])) for each in (room.before, room.last))
        most = len(boundaries) - 1
        ends = np.arange(most + 1) + 1 + np.arange(most)[:, None]
        inside, ends = ends <= most, np.minimum(ends, most)
        chosen = boundaries, boundaries[ends]
        own = np.where(inside & fits[chosen], costs.own[kind][chosen] + slight * before[chosen] ** 2, np.inf)
        stage = own + hops[:, ends][:, None] + hops[None, :, None, :]
        own_last = costs.own_last[kind][boundaries, -1] + slight * behind[boundaries, -1] ** 2
        last = np.where(fits_last[boundaries, -1], own_last + hops, np.inf)
        return cls(stage, last, stage.min(axis=(0, 1, 3)), ends, boundaries)

    def within(self, cap: float) -> StageTakes:
        """Those that take ``cap`` seconds at the most."""
        cap *= 1 + 2 * SLIGHT
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
        at = next(self._starts(math.inf), None)
        while at is not None and at.row:
            at = next(self._behind(at, at.sum * (1 + 1e-9)))
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
        takes, first, transition = self._takes[at.kinds[-1]], at.splits[-1], self._order.transition_to[at.row]
        assert transition is not None
        depth, most = at.depth - self._shift, min(total, LONGEST)
        found: list[tuple[float, float, int, int, int]] = []
        if transition.first and not (self._shift and at.depth):  # none behind
            end = at.so_far + float(takes.last[at.link, first])
            found += [(end, math.inf, 0, 0, 0)] * (end <= most)
        for link, sources in enumerate(self._order.sources(at.row) if depth >= 0 else ()):
            so_far = at.so_far + takes.stage[link, at.link, : len(self._boundaries) - 1 - first, first]
            sums = so_far + self._least[link, depth, sources, first + 1 : first + 1 + len(so_far)]
            rows, ends = (sums <= most).nonzero()
            lists = (
                sums[rows, ends].tolist(),
                so_far[ends].tolist(),
                sources[rows].tolist(),
                (ends + first + 1).tolist(),
            )
            found += ((a, b, row, link, split) for a, b, row, split in zip(*lists, strict=True))
        found.sort(key=itemgetter(0))
        for least, before, row, link, split in found:
            kinds, splits = at.kinds, at.splits
            if row:
                kinds, splits = (*kinds, self._order.kind_of[row]), (*splits, split)
            yield _Partial(least, before, row, link, depth, kinds, splits)


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
