"""Division of layers, in order, among stages, so that the slowest stage is as fast as possible.

:func:`partition` has stages on equal devices, :func:`cheapest_cuts` those of any costs in a given order, and
:func:`cuts_in_order` those on given devices. :class:`Divider` chooses the devices' order too, under their memory, and
leaves devices out where fewer are as good.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot
from lightning_hetpipe.planning.model.costs import NEVER, Costs, Room, kinds_of
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.model.simulate import StageLoad
from lightning_hetpipe.planning.model.stage_memory import first_minibatch
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

ORDERS, CELLS = 400, 40_000_000
"""Most orders that are looked at one by one, and that number times the square of the boundaries (some seconds)."""

LIGHTEST = (StageLoad(1, 0, 1), StageLoad(0, 1, 0))
"""Load of every stage at the least: a minibatch after its forward, gradients after its backward."""


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
        costs: For each stage, an array of (n + 1, n + 1): its cost by the boundaries at which it starts (rows) and
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


def cuts_in_order(
    profile: Profile, cluster: Cluster, slots: Sequence[DeviceSlot], recompute: bool = False
) -> tuple[int, ...]:
    """The first layer of each of ``len(slots)`` stages on ``slots``, which may share a device, with the least T_max.

    Memory is no concern here, and neighbours on one device are taken to be linked as any two of its node are.

    Raises:
        ValueError: if there are more stages than layers.
        SettingError: where the profile has no times of a device.
    """
    if not 1 <= len(slots) <= len(profile.layers):
        raise ValueError(f"cannot divide {len(profile.layers)} layers among {len(slots)} stages")
    costs = Costs(profile, cluster, kinds_of(cluster, slots, apart=True), recompute)
    kinds = range(len(slots))
    return cheapest_cuts([costs.stage(kinds, index) for index in kinds])


def stage_times(times: Sequence[float], cuts: Sequence[int]) -> list[float]:
    """Seconds of each stage, for layers with ``times`` and stages that start at ``cuts``."""
    return [sum(times[a:b]) for a, b in zip(cuts, [*cuts[1:], len(times)], strict=True)]


@dataclass(frozen=True)
class Division:
    """Layers divided among devices.

    Attributes:
        slots: The device of each stage.
        cuts: The first layer of each stage.
        bottleneck: T_max in seconds.
        ticks: The same in whole ticks of its :class:`~lightning_hetpipe.planning.model.costs.Costs`.
    """

    slots: tuple[DeviceSlot, ...]
    cuts: tuple[int, ...]
    bottleneck: float
    ticks: int


class Divider:
    """Divider of the layers of ``profile`` among ``slots`` of ``cluster``, as often as asked, under different limits.

    It finds the least T_max that there is over all cuts, all subsets of the devices and, unless ``ordered``, all their
    orders, under the memory bound that is given: exactly, to a tick of about 2^-50 of the model's time. Where there are
    too many kinds of devices to look through all orders (16 devices of 4 types are not), only those are looked at in
    which the devices of a node stand together, or in the end the given order; ``exact`` says so.

    Of orders that are as good it takes one with few stages; of cuts as good, the earliest last one, and so on
    backwards: what comes before a cut is divided as well as it can be.

    Args:
        profile: The model's.
        cluster: Whose links connect the devices.
        slots: The devices.
        ordered: Whether stages are to lie on them in their order; some may be left out all the same.
        state: The optimizer's bytes for each byte of the weights.
        recompute: Whether forwards are computed again for their backwards.
        stages: How many there are to be, at most one for each layer and each device; None for as many as are of use.
        watched: Whether the first minibatch of a fit is to run on the last stage's device, whole.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        slots: Sequence[DeviceSlot],
        *,
        ordered: bool = False,
        state: float = 0.0,
        recompute: bool = False,
        stages: int | None = None,
        watched: bool = True,
    ) -> None:
        self._layers = profile.layers
        self._whole = first_minibatch(profile.layers, state) if watched else 0
        self._stages = stages
        self._state = state
        self._recompute = recompute
        self._ordered = ordered
        self._in_order = Costs(profile, cluster, kinds_of(cluster, slots, apart=True), recompute)
        self.costs = self._in_order if ordered else Costs(profile, cluster, kinds_of(cluster, slots), recompute)
        self._rules: list[Callable[[Costs], Rules]] = [GivenOrder] if ordered else [AnyOrder, NodesTogether, GivenOrder]
        self._known: DeviceOrders | None = None
        self.exact = True

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
        orders = self._device_orders()
        room = self._room(orders.costs, in_flight, loads, limited)
        found = least_bottleneck(orders, room, at_least)
        if found is None:
            return None
        division = _in_order(orders.costs, found.kinds, room)
        assert division is not None
        assert division.ticks == found.bottleneck, "the least of this order is the least of all"
        return division

    def in_each_order(
        self, in_flight: int, loads: Sequence[Collection[StageLoad]], limited: bool = True
    ) -> Iterator[Division]:
        """Yield for each order of each subset the stages with the least T_max; nothing where there are too many."""
        room = self._room(self.costs, in_flight, loads, limited)
        for kinds in self._orders:
            if (found := _in_order(self.costs, kinds, room)) is not None:
                yield found

    @cached_property
    def _orders(self) -> Sequence[tuple[int, ...]]:
        """All orders of all subsets; none, where there are too many."""
        rules: Rules = GivenOrder(self.costs) if self._ordered else AnyOrder(self.costs)
        groups = [kind.group for kind in self.costs.kinds]
        most = min(ORDERS, CELLS // (len(self._layers) + 1) ** 2)
        found: list[tuple[int, ...]] = []
        longest: list[tuple[tuple[int, ...], State]] = [((), (rules.start, -1))]
        for _ in self._layers:
            longest = [
                ((kind, *kinds), (left, groups[kind])) for kinds, state in longest for kind, left in rules.next(state)
            ]
            found += (kinds for kinds, _ in longest if self._stages in (None, len(kinds)))
            if max(len(found), len(longest)) > most:
                return ()
        return found

    def _room(self, costs: Costs, in_flight: int, loads: Sequence[Collection[StageLoad]], limited: bool = True) -> Room:
        return Room(self._layers, costs.kinds, in_flight, self._state, self._recompute, loads, self._whole, limited)

    def _device_orders(self) -> DeviceOrders:
        """Orders that are looked through: all, or as many as can be."""
        while self._known is None:
            rules = self._rules.pop(0)
            costs = self._in_order if rules is GivenOrder else self.costs
            try:
                self._known = DeviceOrders(costs, rules(costs), self._stages)
            except TooMany:
                self.exact = False
        return self._known


def _in_order(costs: Costs, kinds: Sequence[int], room: Room) -> Division | None:
    """The stages with the least T_max on ``kinds`` of devices, in this order; None if they have no room."""
    takes = []
    for index, kind in enumerate(kinds):
        take = costs.stage(kinds, index)
        if (reach := room.reach(kind, len(kinds) - 1 - index)) is not None:
            take[np.arange(len(reach))[None, :] > reach[:, None]] = NEVER
        takes.append(take)
    cuts = cheapest_cuts(takes)
    if any(take[here] >= NEVER for take, here in zip(takes, pairwise((*cuts, costs.layers)), strict=True)):
        return None
    ticks = costs.bottleneck(kinds, cuts)
    return Division(costs.slots(kinds), cuts, ticks * costs.tick, ticks)
