"""Plans at one Nm: divisions with small periods are simulated until none that is left can be faster by more than 1%.

How many minibatches a stage holds, and so how much memory it takes, is known only once a division is simulated. So

1. the division with the least period is looked for where stages hold the least that they can. Where it does not fit as
   simulated, stages are taken to hold what was seen there, and it is looked for anew, until one fits;
2. the period of the first of these is a bound that no plan beats. While the best plan that fits is further from the
   bound than 1%, other divisions are simulated, those with small periods first, as many as the effort allows;
3. where the effort did not suffice, or not all orders of the devices were looked through, a local search goes on from
   the best plan (:func:`changes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

from lightning_hetpipe.planning.model.costs import Division
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.search.divider import CLOSE
from lightning_hetpipe.planning.search.problem import MINIBATCHES, WAVES, PlanningProblem, Seen

ENOUGH = 0.99
"""Part of a bound, or of a rate, that is as good as all of it."""

RAISES = 8
"""Largest number of times that loads are raised, the last time to all that are in flight. With this time alone, a plan
for 8 nodes of 2 is 3% slower."""

WIDER = (1.01, 1.03, 1.1, 1.3, 2.0, 8.0, 64.0, 4096.0)
"""Periods, as multiples of the least one, up to which divisions are looked at. With one for all, the plan for 2 nodes
of 4 is 7% slower (``benchmarks/planning.py``)."""

GLIMPSE, WORK, MUCH = 30_000, 100_000, 300_000
"""Number of tasks that are simulated before the search goes on locally, and again there: while Nm is not chosen yet,
where it is given, and for the one that is chosen. With the last number for all, an allocation of 16 devices takes 1.6
times as long. With the second for all, the plan for 2 nodes of 4 is 6% slower (``benchmarks/planning.py``)."""

GLANCE = 100
"""Number of tasks that could be simulated in the time that it takes to find another division."""

UPHILL = 1.0005
"""Smallest gain of throughput, as a factor, that is worth a change."""


Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The kind of each stage's device, and its first layer."""


class PlansAt:
    """Plans of ``problem`` at Nm = ``in_flight``.

    Attributes:
        found: The fastest plan that was found to fit.
        complete: Whether no plan is faster than that by more than 1%, as all that could be were simulated.
    """

    def __init__(self, problem: PlanningProblem, in_flight: int) -> None:
        self.found: Estimate | None = None
        self.complete = False
        self._problem = problem
        self._in_flight = in_flight
        self._seen: set[object] = set()
        self._best: Division | None = None
        self._work = 0

    @property
    def fits(self) -> bool:
        """True if a plan was found that fits."""
        if self.bound is not None and self.found is None:
            self._look_at_others(0.0, GLIMPSE)
        return self.found is not None

    def best(self, floor: float = 0.0, work: int = WORK) -> Estimate | None:
        """The fastest plan that is found to fit; None where none is.

        Args:
            floor: Minibatches per second; plans with less are not looked for, and may be returned all the same.
            work: Number of tasks that may be simulated to find others than the first.
        """
        if self.fits and self.bound is not None and not self._is_enough(self.bound, floor):
            most = 0 if self._problem.brief else work
            self._look_at_others(floor, most)
            if not self.complete:
                self._climb(floor, most)
        return self.found

    @cached_property
    def bound(self) -> float | None:
        """Seconds for each minibatch that no plan beats, in the orders of devices that are looked through; None where
        no plan fits there. Loads are raised until the division with the least period fits."""
        problem, seen, lacking = self._problem, list[Seen](), list[Seen]()
        bound = None
        for number in range(RAISES):
            loads = (problem.heaviest if number + 1 == RAISES else problem.lightest)(self._in_flight)
            room = problem.room(self._in_flight, loads, seen=[*seen, *lacking])
            found = problem.divider.least(self._in_flight, room, problem.synchronise, bound or 0.0)
            if not found:
                break
            bound = bound or self._period(found[0]) / CLOSE
            if (look := self._estimate(found[0])).fits:
                break
            seen = [(stage.load, stage.first, stage.last) for stage in look.stages[:-1]]
            lacking += [(stage.load, 0, stage.last) for stage in look.stages[:-1] if stage.overflow]
        return bound

    def least_lacking(self) -> Estimate:
        """The plan whose devices lack the least memory, as far as is found.

        Without the local search, plans of small problems lack up to 17% more.
        """
        problem, loads = self._problem, self._problem.heaviest(self._in_flight)
        low, high = 1.0, 2.0
        found: Division | None = None
        while found is None or high > low * 1.01:
            share = high if found is None else math.sqrt(low * high)
            divisions = problem.divider.least(self._in_flight, problem.room(self._in_flight, loads, share))
            if divisions:
                found, high = divisions[0], share
            else:
                low, high = share, high if found else 2 * high
        look, most, changed = self._estimate(found), self._work + WORK, not problem.brief
        while changed and self._work <= most:
            changed = False
            for division in changes(problem, found):
                if not self._is_seen(division) and _lack(other := self._estimate(division)) < _lack(look):
                    found, look, changed = division, other, True
                    break
        return look

    def _period(self, division: Division) -> float:
        return division.period(self._in_flight, self._problem.synchronise)

    def _is_enough(self, period: float, floor: float) -> bool:
        """Tell whether what takes ``period`` at the least is hardly faster than the best plan, or than ``floor``."""
        rate = 0.0 if self.found is None else self.found.rate
        return max(rate / ENOUGH, floor) * period >= 1

    def _look_at_others(self, floor: float, work: int) -> None:
        """Simulate divisions, in rings of growing periods, until none that is left is faster or the effort is spent."""
        problem, bound, most = self._problem, self.bound, self._work + work
        room = problem.room(self._in_flight, problem.lightest(self._in_flight))
        assert bound is not None
        for wider in WIDER:
            rate = 0.0 if self.found is None else self.found.rate
            period = min(bound * wider, 1 / max(rate / ENOUGH, floor, 1e-300))
            for division in problem.divider.within(period, self._in_flight, room, problem.synchronise):
                if self._work > most:
                    return
                self._work += GLANCE
                if not self._is_enough(self._period(division), floor):
                    self._look(division)
            if self._is_enough(period, floor):
                self.complete = problem.divider.exact and problem.divider.whole
                break

    def _climb(self, floor: float, work: int) -> None:
        """Change the best plan, one change at a time, while that makes it faster and the effort allows."""
        at, most = None, self._work + work
        while at != self._best and self._best is not None:
            at = self._best
            for division in changes(self._problem, at):
                assert self.found is not None
                if self._work > most:
                    return
                if self._period(division) * max(self.found.rate * UPHILL, floor) < 1:
                    self._look(division)
                    if self._best != at:
                        break

    def _look(self, division: Division) -> None:
        """Simulate ``division``, if it may fit, and keep it if it is the best."""
        if self._is_seen(division) or self._problem.surely_lacks(division, self._in_flight):
            return
        self._estimate(division)

    def _estimate(self, division: Division) -> Estimate:
        """Simulate ``division``, and keep it if it is the best."""
        self._count(division)
        found = self._problem.simulated(division, self._in_flight)
        if found.fits and (self.found is None or found.rate > self.found.rate):
            self.found, self._best = found, division
        return found

    def _key(self, division: Division) -> object:
        return division.splits, division.kinds if self._problem.ordered else self._problem.costs.alike(division.kinds)

    def _is_seen(self, division: Division) -> bool:
        return self._key(division) in self._seen

    def _count(self, division: Division) -> None:
        self._seen.add(self._key(division))
        self._work += 2 * len(division.kinds) * max(MINIBATCHES, WAVES * self._in_flight)


def _lack(found: Estimate) -> int:
    """Bytes that all devices together lack."""
    return sum(stage.overflow for stage in found.stages)


def changes(problem: PlanningProblem, division: Division) -> Iterator[Division]:
    """Yield the divisions that differ from ``division`` by one change: a split point moves, two devices change places,
    another is taken or added."""
    costs = problem.costs
    kinds, splits = division.kinds, division.splits
    ends = (*splits[1:], costs.layers)
    places = [*_moved(splits, ends, kinds), *_placed(problem, kinds, splits, ends)]
    for other, starts in places:
        if problem.stages in (None, len(other)) and (not problem.ordered or _is_rising(other)):
            yield Division.of(costs, other, starts)


def _moved(splits: Sequence[int], ends: Sequence[int], kinds: tuple[int, ...]) -> Iterator[Place]:
    """Move one split point, by 1, 2, 4, ... layers."""
    step = 1
    while step <= max(1, ends[-1] // 2):
        for index in range(1, len(splits)):
            for split in (splits[index] - step, splits[index] + step):
                if splits[index - 1] < split < ends[index]:
                    yield kinds, (*splits[:index], split, *splits[index + 1 :])
        step *= 2


def _placed(
    problem: PlanningProblem, kinds: tuple[int, ...], splits: tuple[int, ...], ends: tuple[int, ...]
) -> Iterator[Place]:
    """Change devices, whatever their order."""
    idle = [kind for kind, each in enumerate(problem.costs.kinds) if kinds.count(kind) < len(each.slots)]
    for index, kind in enumerate(kinds):
        before, after = kinds[:index], kinds[index + 1 :]
        for other in idle:
            if other != kind:
                yield (*before, other, *after), splits
            if ends[index] - splits[index] > 1:
                split = (*splits[: index + 1], (splits[index] + ends[index]) // 2, *splits[index + 1 :])
                yield (*before, other, kind, *after), split
                yield (*before, kind, other, *after), split
        for second in range(index):
            if kinds[second] != kind:
                yield (*kinds[:second], kind, *kinds[second + 1 : index], kinds[second], *after), splits


def _is_rising(kinds: Sequence[int]) -> bool:
    return all(one < other for one, other in pairwise(kinds))
