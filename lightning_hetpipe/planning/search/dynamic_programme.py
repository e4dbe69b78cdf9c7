"""Dynamic programme for the least sum of times of all stages, which are placed from the last one to the first.

Its states are those of :mod:`~lightning_hetpipe.planning.search.device_orders`, with the boundary at which the foremost
stage starts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from lightning_hetpipe.planning.model.costs import Costs, Floats
from lightning_hetpipe.planning.search.device_orders import DeviceOrder, Rows, Step, Twins
from lightning_hetpipe.planning.search.division import Division, Room

CELLS = 1 << 20
"""Numbers that are worked on at once."""

LINKS = range(2)
"""Within a node, and across nodes."""

SLIGHT = 1e-5
"""Part of the time of all layers that the square of their bytes counts as, so that of divisions as fast one with few
bytes on each device is the best."""


@dataclass(frozen=True)
class StageTakes:
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
    def of(cls, costs: Costs, kind: int, room: Room, boundaries: Rows) -> StageTakes:
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

    def within(self, cap: float) -> StageTakes:
        """Those that take ``cap`` seconds at the most."""
        cap *= 1 + 2 * SLIGHT
        stage = np.where(self.stage <= cap, self.stage, np.inf)
        finite = np.flatnonzero(np.isfinite(stage).any(axis=(0, 1, 2)))
        width = int(finite[-1]) + 1 if len(finite) else 1
        last = np.where(self.last <= cap, self.last, np.inf)
        return StageTakes(stage[..., :width], last, self.ends[:, :width], self.boundaries)

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

    def _place(self, step: Step, link: int, behind: Floats) -> None:
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
