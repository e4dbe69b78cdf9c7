"""Division of the layers among unequal devices with the least T_max, in the best order of the devices."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import numpy as np

from lightning_hetpipe.planning.model.cluster import DeviceSlot
from lightning_hetpipe.planning.model.costs import NEVER, Costs, MemoryBound
from lightning_hetpipe.planning.model.simulate import StageLoad
from lightning_hetpipe.planning.search.device_order import (
    AnyOrder,
    DeviceOrders,
    GivenOrder,
    NodesTogether,
    Rules,
    State,
    TooMany,
    least_bottleneck,
)
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.planning.search.split_points import best_split_points

ORDERS, CELLS = 400, 40_000_000
"""Largest number of orders that are tried one by one, alone and times the square of the boundaries: some seconds."""

LIGHTEST = (StageLoad(1, 0, 1), StageLoad(0, 1, 0))
"""Load of every stage at the least: a minibatch after its forward, gradients after its backward."""


@dataclass(frozen=True)
class Division:
    """Layers divided among devices.

    Attributes:
        slots: The device of each stage.
        splits: The first layer of each stage.
        bottleneck: T_max in seconds.
        ticks: The same in whole ticks of its :class:`~lightning_hetpipe.planning.model.costs.Costs`.
    """

    slots: tuple[DeviceSlot, ...]
    splits: tuple[int, ...]
    bottleneck: float
    ticks: int


class Divider:
    """Divider of the layers of ``problem`` among its devices, as often as asked, under different memory bounds.

    It finds the least T_max over all split points, all subsets of the devices and, unless they are ordered, all their
    orders, exactly, to a tick of about 2^-50 of the model's time. Where there are too many kinds of devices to look
    through all orders (16 devices of 4 types are not), only those are looked at in which the devices of a node stand
    together, or in the end the given order; ``exact`` says so.

    Of orders that are as good it takes one with few stages; of split points as good, the earliest last one, and so on
    backwards.
    """

    RULES: ClassVar[tuple[type[Rules], ...]] = (AnyOrder, NodesTogether, GivenOrder)

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        in_order = problem.costs(apart=True)
        self.costs = in_order if problem.ordered else problem.costs(apart=False)
        self.exact = True
        for rules in self.RULES[-1:] if problem.ordered else self.RULES:
            costs = in_order if rules is GivenOrder else self.costs
            try:
                self._device_orders = DeviceOrders(costs, rules(costs), problem.stages)
                break
            except TooMany:
                self.exact = False

    def divide(
        self,
        in_flight: int = 1,
        loads: Sequence[Collection[StageLoad]] = (LIGHTEST,),
        at_least: int = 0,
        limited: bool = True,
    ) -> Division | None:
        """The stages with the least T_max; None if none have room.

        Args:
            in_flight: Nm.
            loads: The memory bound: by the distance from the last stage, what a stage there holds at one time or
                another; beyond, as the last of them.
            at_least: Ticks known as a lower bound.
            limited: Whether the memory of the devices is a limit.
        """
        orders = self._device_orders
        bound = self._problem.memory_bound(orders.costs, in_flight, loads, limited)
        found = least_bottleneck(orders, bound, at_least)
        if found is None:
            return None
        division = _in_order(orders.costs, found.kinds, bound)
        assert division is not None
        assert division.ticks == found.bottleneck, "the least of this order is the least of all"
        return division

    def in_each_order(
        self, in_flight: int, loads: Sequence[Collection[StageLoad]], limited: bool = True
    ) -> Iterator[Division]:
        """Yield for each order of each subset the stages with the least T_max; nothing where there are too many."""
        bound = self._problem.memory_bound(self.costs, in_flight, loads, limited)
        for kinds in self._orders:
            if (found := _in_order(self.costs, kinds, bound)) is not None:
                yield found

    @cached_property
    def _orders(self) -> Sequence[tuple[int, ...]]:
        """All orders of all subsets; none, where there are too many."""
        rules: Rules = GivenOrder(self.costs) if self._problem.ordered else AnyOrder(self.costs)
        groups = [kind.group for kind in self.costs.kinds]
        most = min(ORDERS, CELLS // (self.costs.layers + 1) ** 2)
        found: list[tuple[int, ...]] = []
        longest: list[tuple[tuple[int, ...], State]] = [((), (rules.start, -1))]
        for _ in range(self.costs.layers):
            longest = [
                ((kind, *kinds), (left, groups[kind])) for kinds, state in longest for kind, left in rules.next(state)
            ]
            found += (kinds for kinds, _ in longest if self._problem.stages in (None, len(kinds)))
            if max(len(found), len(longest)) > most:
                return ()
        return found


def _in_order(costs: Costs, kinds: Sequence[int], bound: MemoryBound) -> Division | None:
    """The stages with the least T_max on ``kinds`` of devices, in this order; None if they have no room."""
    takes = []
    for index, kind in enumerate(kinds):
        take = costs.stage(kinds, index)
        if (reach := bound.reach(kind, len(kinds) - 1 - index)) is not None:
            take[np.arange(len(reach))[None, :] > reach[:, None]] = NEVER
        takes.append(take)
    splits = best_split_points(takes)
    if any(take[here] >= NEVER for take, here in zip(takes, pairwise((*splits, costs.layers)), strict=True)):
        return None
    ticks = costs.bottleneck(kinds, splits)
    return Division(costs.slots(kinds), splits, ticks * costs.tick, ticks)
