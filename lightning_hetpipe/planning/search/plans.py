"""Plans at one Nm. Divisions with small periods are simulated until no other division can be faster by more than 1%.

How many minibatches a stage holds, and so its memory, is known only after a simulation. Therefore

1. the search takes the division with the smallest period, if stages hold as little as possible. If it does not fit as
   simulated, stages are assumed to hold what was seen there, and the search is repeated until a division fits.
2. The period of the first of these divisions is a bound for all plans. While the best fitting plan is more than 1% from
   the bound, other divisions are simulated in order of their periods, as far as the effort allows.
3. If the effort did not suffice, or not all orders of devices were searched, a local search by :func:`changes` improves
   the best plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TypeAlias

from lightning_hetpipe.planning.model.costs import Division
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.search.divider import CLOSE
from lightning_hetpipe.planning.search.problem import MINIBATCHES, WAVES, PlanningProblem, Seen

ENOUGH = 0.99
"""Fraction of a bound or a rate that counts as all of it."""

RAISES = 8
"""Largest number of times that loads are raised, the last time to all minibatches in flight. With the last raise alone,
a plan for 8 nodes of 2 is 3% slower."""

WIDER = (1.01, 1.03, 1.1, 1.3, 2.0, 8.0, 64.0, 4096.0)
"""Multiples of the smallest period up to which divisions are searched, one after another. With one multiple alone, the
plan for 2 nodes of 4 is 7% slower (``benchmarks/planning.py``)."""

GLIMPSE, WORK, MUCH = 30_000, 100_000, 300_000
"""Number of tasks that are simulated before the local search, and again in it: while Nm is chosen, for a given Nm, and
for the chosen Nm. With the last number for all, an allocation of 16 devices takes 1.6 times as long. With the second
for all, the plan for 2 nodes of 4 is 6% slower (``benchmarks/planning.py``)."""

GLANCE = 100
"""Number of tasks whose simulation takes as long as finding another division."""

UPHILL = 1.0005
"""Smallest factor of throughput that is worth a change."""

Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The kind of each stage's device, and its first layer."""


class PlansAt:
    """Plans of ``problem`` at Nm = ``in_flight``. ``found`` is the fastest plan that fits.

    ``complete`` is True if no plan is faster by more than 1%, because all candidates were simulated.
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
        """Return the fastest plan that fits, or None. After the first plan, up to ``work`` tasks may be simulated.

        Plans with less than ``floor`` minibatches per second are not searched, but may be returned.
        """
        if self.fits and self.bound is not None and not self._is_enough(self.bound, floor):
            most = 0 if self._problem.brief else work
            self._look_at_others(floor, most)
            if not self.complete:
                self._climb(floor, most)
        return self.found

    @cached_property
    def bound(self) -> float | None:
        """Lower bound of the seconds per minibatch in the searched orders of devices, or None if no plan fits there.

        Loads are raised until the division with the smallest period fits.
        """
        problem, seen, lacking = self._problem, list[Seen](), list[Seen]()
        bound = None
        for number in range(RAISES):
            room = problem.room(self._in_flight, full=number + 1 == RAISES, seen=[*seen, *lacking])
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
        """Search for the plan whose devices lack the least memory.

        Without the local search, plans of small problems lack up to 17% more.
        """
        problem, low, high = self._problem, 1.0, 2.0
        found: Division | None = None
        while found is None or high > low * 1.01:
            share = high if found is None else math.sqrt(low * high)
            divisions = problem.divider.least(self._in_flight, problem.room(self._in_flight, full=True, share=share))
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
        """Return True if a plan with at least ``period`` is hardly faster than the best plan, or than ``floor``."""
        rate = 0.0 if self.found is None else self.found.rate
        return max(rate / ENOUGH, floor) * period >= 1

    def _look_at_others(self, floor: float, work: int) -> None:
        """Simulate divisions in order of growing periods, until no other is faster or the effort is spent."""
        problem, bound, most = self._problem, self.bound, self._work + work
        room = problem.room(self._in_flight)
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
        """Improve the best plan by single changes while the effort allows."""
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
        """Simulate ``division`` if it may fit, and keep it if it is the best."""
        if self._is_seen(division) or self._problem.surely_lacks(division, self._in_flight):
            return
        self._estimate(division)

    def _estimate(self, division: Division) -> Estimate:
        """Simulate ``division``, and keep it if it is the best."""
        self._seen.add(self._key(division))
        self._work += 2 * len(division.kinds) * max(MINIBATCHES, WAVES * self._in_flight)
        slots = self._problem.costs.slots(division.kinds)
        found = self._problem.estimate(slots, division.splits, self._in_flight)
        self._problem.progress()
        if found.fits and (self.found is None or found.rate > self.found.rate):
            self.found, self._best = found, division
        return found

    def _key(self, division: Division) -> object:
        return division.splits, division.kinds if self._problem.ordered else self._problem.costs.alike(division.kinds)

    def _is_seen(self, division: Division) -> bool:
        return self._key(division) in self._seen


def _lack(found: Estimate) -> int:
    return sum(stage.overflow for stage in found.stages)


def changes(problem: PlanningProblem, division: Division) -> Iterator[Division]:
    """Yield divisions one change away from ``division``: a moved split point, swapped, replaced or added devices."""
    costs = problem.costs
    kinds, splits = division.kinds, division.splits
    ends = (*splits[1:], costs.layers)
    places = [*_moved(splits, ends, kinds), *_placed(problem, kinds, splits, ends)]
    for other, starts in places:
        if problem.stages in (None, len(other)) and (not problem.ordered or [*other] == sorted({*other})):
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
