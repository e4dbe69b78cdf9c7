"""Divides layers, in order, among stages, so that the slowest stage is as fast as possible.

:func:`partition` has stages on equal devices, and :func:`cheapest_cuts` those of any costs in a given order.
:func:`divide` chooses the devices' order too, and leaves devices out where fewer are as good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hetpipe.planning.arrangement import (
    AnyOrder,
    Arrangement,
    GivenOrder,
    NodesTogether,
    Rules,
    TooMany,
    least_bottleneck,
)
from lightning_hetpipe.planning.cluster import Cluster, Spot
from lightning_hetpipe.planning.costs import NEVER, Costs, Room, kinds_of
from lightning_hetpipe.planning.profile import Profile
from lightning_hetpipe.planning.simulate import Load


def partition(times: Sequence[float], stages: int) -> tuple[int, ...]:
    """The first layer of each stage, in the contiguous partition with the least maximal stage time.

    Every stage gets at least one layer. Of several optimal partitions it takes the one whose last cut is earliest, and
    so on backwards.

    Args:
        times: Seconds of each layer, forward and backward; not negative.
        stages: k, from 1 to ``len(times)``.

    Raises:
        ValueError: if there are more stages than layers, or no stage.
    """
    if not 1 <= stages <= len(times):
        raise ValueError(f"cannot divide {len(times)} layers among {stages} stages")
    before = np.cumsum([0.0, *times])
    take = np.where(np.tri(len(before), dtype=bool), np.inf, before[None, :] - before[:, None])
    return cheapest_cuts([take] * stages)


def cheapest_cuts(costs: Sequence[NDArray[Any]]) -> tuple[int, ...]:
    """The first layer of each stage, where the most that a stage costs is least.

    Dynamic programming over (stages used, layers placed); O(k n²) for n layers on k stages. Of several optimal
    partitions it takes the one whose last cut is earliest, and so on backwards: what comes before it is optimal too.

    Args:
        costs: Of each stage, an array of (n + 1, n + 1): what it costs by the boundaries at which it starts (rows) and
            ends (columns), where boundary b lies before layer b. Where it may not, something large.
    """
    chosen: list[NDArray[np.intp]] = []
    best: NDArray[Any] | None = None
    for cost in costs:
        if best is None:
            best = cost[0]
            continue
        worst = np.maximum(best[:, None], cost)
        chosen.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    assert best is not None
    cuts = [len(best) - 1]
    for starts in reversed(chosen):
        cuts.append(int(starts[cuts[-1]]))
    return (0, *reversed(cuts[1:]))


def stage_times(times: Sequence[float], cuts: Sequence[int]) -> list[float]:
    """Seconds of each stage, for layers with ``times`` and stages that start at ``cuts``."""
    return [sum(times[a:b]) for a, b in zip(cuts, [*cuts[1:], len(times)], strict=True)]


@dataclass(frozen=True)
class Division:
    """Layers on devices.

    Attributes:
        spots: The device of each stage.
        cuts: The first layer of each stage.
        bottleneck: T_max in seconds.
        ticks: The same in whole ticks of its :class:`~lightning_hetpipe.planning.costs.Costs`.
    """

    spots: tuple[Spot, ...]
    cuts: tuple[int, ...]
    bottleneck: float
    ticks: int


class Dividing:
    """Divides the layers of ``profile`` among ``spots`` of ``cluster``, as often as asked, under different limits.

    The least T_max there is, over all cuts, all subsets of the devices and, unless ``ordered``, all their orders, under
    the memory bound that is given: exact, to a tick of 2^-50 of the model's time. Devices of one kind count as
    interchangeable. Where there are too many kinds to look through all orders (16 devices of 4 types are not), only
    those are looked at in which the devices of a node stand together, and then only the given order; ``exact`` says so.

    Of arrangements that are as good it takes one with the fewest stages; of cuts as good, the earliest last one, and
    so on backwards, so that the other stages are as even as they can be.
    """

    def __init__(self, profile: Profile, cluster: Cluster, spots: Sequence[Spot], ordered: bool = False) -> None:
        self._profile = profile
        self._in_order = Costs(profile, cluster, kinds_of(cluster, spots, apart=True))
        self._costs = self._in_order if ordered else Costs(profile, cluster, kinds_of(cluster, spots))
        self._rules: list[Callable[[Costs], Rules]] = [GivenOrder] if ordered else [AnyOrder, NodesTogether, GivenOrder]
        self.exact = True

    def divide(
        self,
        *,
        in_flight: int = 1,
        state: float = 0.0,
        recompute: bool = False,
        loads: Sequence[Load] = (Load(1, 1),),
        besides: int = 0,
        at_least: int = 0,
    ) -> Division | None:
        """The stages with the least T_max; None if none have room.

        Args:
            in_flight: Nm.
            state: The optimizer's bytes for each byte of the weights.
            recompute: Whether forwards are computed again.
            loads: The memory bound: by the distance from the last stage, what a stage there holds at the most; beyond,
                as the last of them.
            besides: Bytes that each device has besides, to see by how much plans do not fit.
            at_least: Ticks that it is known to take.
        """
        while True:
            costs = self._costs
            room = Room(self._profile.layers, costs.kinds, in_flight, state, recompute, loads, besides)
            try:
                found = least_bottleneck(costs, self._rules[0](costs), room, at_least)
            except TooMany:
                self._rules.pop(0)
                self.exact = False
                if self._rules[0] is GivenOrder:
                    self._costs = self._in_order
                continue
            return None if found is None else self._division(found, room)

    def _division(self, found: Arrangement, room: Room) -> Division:
        costs, kinds = self._costs, found.kinds
        left = [iter(kind.spots) for kind in costs.kinds]
        takes = []
        for index, kind in enumerate(kinds):
            take = costs.stage(kinds, index)
            if (reach := room.reach(kind, len(kinds) - 1 - index)) is not None:
                take[np.arange(len(reach))[None, :] > reach[:, None]] = NEVER
            takes.append(take)
        cuts = cheapest_cuts(takes)
        ticks = costs.bottleneck(kinds, cuts)
        assert ticks == found.bottleneck, "the least of this order is the least of all"
        return Division(tuple(next(left[kind]) for kind in kinds), cuts, ticks * costs.tick, ticks)
