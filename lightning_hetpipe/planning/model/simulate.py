"""Simulation of one virtual worker: which stage does what when, under the schedule that the engine interprets too.

Time only moves from event to event, so that a run of hours takes no longer than its number of tasks. What it knows:

- Each stage runs its tasks first in, first out, in the order in which they become ready (law L2); the tasks of a
  minibatch are those of :func:`~lightning_hetpipe.rules.schedule.route`. A segment that is visited several times and
  changes buffers takes minibatches one by one (:class:`~lightning_hetpipe.rules.call_order.CallOrder`).
- Minibatch p starts when the version that it uses is published, p - Nm under weight stashing, and the first Nm at once
  (law L1).
- What a stage is sent arrives as part of the task that needs it, as the engine moves it: a link keeps the stage that
  receives busy, and so counts towards T_max.
- Lightning's thread takes the minibatches in order: each step lasts ``step`` seconds (hooks, optimizer), and one that
  ends a wave another ``synchronise`` (law L3), in which the pipeline goes on with what is in flight.
- With ``jitter`` every task takes longer or shorter by a factor of its own, drawn for the ``seed``, the stage, the task
  and the minibatch: the same for the same seed, whatever else changes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_hetpipe.planning.model.simulated_calls import SimulatedCalls
from lightning_hetpipe.rules.schedule import Call, Segment, Work, calls, route, segments
from lightning_hetpipe.rules.versions import STASH, Versions

_ENDS, _FORWARDED, _READY = range(3)


@dataclass(frozen=True)
class Visits:
    """Visits of a minibatch to stages, where modules are called several times or a stage has parts of several.

    Attributes:
        segments: All, as :func:`~lightning_hetpipe.rules.schedule.segments` gives them.
        calls: The calls of the step.
        changing: The indices of the segments whose forwards change buffers.
    """

    segments: Sequence[Segment]
    calls: Sequence[Call]
    changing: Collection[int] = ()

    @classmethod
    def once(cls, stages: int) -> Visits:
        """One call of one module that has a segment on each stage."""
        return cls(segments([stages], range(stages)), calls([0]))


@dataclass(frozen=True)
class StageTimes:
    """Seconds that a stage takes for one minibatch, or a segment of it for one visit.

    Attributes:
        forward, backward: Seconds of its layers.
        receive: Until what the stage before it sends has arrived.
        loss: Seconds of the user's code between forward and backward, on the last stage.
        receive_gradient: Until the gradient that the stage behind it sends has arrived.
    """

    forward: float
    backward: float
    receive: float = 0.0
    loss: float = 0.0
    receive_gradient: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all that a minibatch takes here; T_max is the slowest stage's."""
        return self.receive + self.forward + self.loss + self.receive_gradient + self.backward

    def of(self, work: Work) -> float:
        """Seconds of one task; on the last stage forward, loss and backward are one."""
        if work is Work.FORWARD:
            return self.receive + self.forward
        return self.receive_gradient + self.backward if work is Work.BACKWARD else self.total


class StageLoad(NamedTuple):
    """Minibatches that a stage holds at one time.

    Attributes:
        held: Minibatches whose activations it holds: from the end of their forward, when these are all there, to the
            end of their backward.
        waiting: Minibatches whose gradients wait for Lightning's step, from the end of their backward.
        whole: Of those held, the one that the stage computes: where forwards are computed again, it keeps the inputs
            alone of the others. 0 or 1.
    """

    held: int
    waiting: int
    whole: int = 1


class SimulatedTask(NamedTuple):
    """A task of a stage: from ``start`` to ``end``, in seconds since the pipeline started.

    ``forwarded`` is when its forward is done; of a backward, when it starts.
    """

    stage: int
    work: Work
    minibatch: int
    start: float
    end: float
    forwarded: float


@dataclass(frozen=True)
class Simulation:
    """Result of a simulated run.

    Attributes:
        spans: Every task, by its start.
        published: When version p came to be, for p = 1, 2, ...
        held: For each stage, the most minibatches whose activations it held at once.
    """

    spans: tuple[SimulatedTask, ...]
    published: tuple[float, ...]
    held: tuple[int, ...]

    def rate(self, edge: int = 0) -> float:
        """Minibatches per second, without the first and the last ``edge`` of them, where the pipeline fills and drains.

        Raises:
            ValueError: if none is left.
        """
        last = len(self.published) - edge
        if not 0 <= edge < last:
            raise ValueError(f"edge={edge} leaves none of {len(self.published)} minibatches")
        began = self.published[edge - 1] if edge else 0.0
        return (last - edge) / (self.published[last - 1] - began)

    def loads(self, stage: int) -> Iterator[tuple[float, StageLoad]]:
        """Changes of what ``stage`` holds, with their times; changes at one time are yielded one by one."""
        when, *counts = (each.tolist() for each in self._changes(stage))
        yield from zip(when, map(StageLoad, *counts), strict=True)

    def heaviest(self, stage: int) -> list[StageLoad]:
        """Loads of ``stage`` of which the heaviest is one: for so many held and computed, the most that wait."""
        _, held, waiting, whole = self._changes(stage)
        base = int(waiting.max()) + 1
        codes = np.unique((2 * held + whole) * base + waiting)
        codes = codes[np.append(codes[1:] // base != codes[:-1] // base, True)]
        return [StageLoad(code // base // 2, code % base, code // base % 2) for code in codes.tolist()]

    def _changes(self, stage: int) -> tuple[NDArray[Any], ...]:
        """Times at which what ``stage`` holds changes, and what is held, waits and is computed from then on."""
        _, works, numbers, _, ends, forwarded = zip(*self._by_stage[stage], strict=True)
        backward, forward = (np.array([work is each for work in works]) for each in (Work.BACKWARD, Work.FORWARD))
        minibatch, count = np.array(numbers), len(works)
        # Of several visits, the first forward is when it begins to be held, and the end of the last backward is when
        # its gradients begin to wait.
        deltas = np.zeros((2 * count + len(self.published), 3), dtype=np.intp)
        fresh = np.flatnonzero(~backward)
        deltas[2 * fresh[np.unique(minibatch[fresh], return_index=True)[1]], 0] = 1
        over = np.flatnonzero(~forward)[::-1]
        deltas[2 * over[np.unique(minibatch[over], return_index=True)[1]] + 1, :2] = -1, 1
        deltas[: 2 * count, 2] = np.tile([1, -1], count)
        deltas[2 * count :, 1] = -1  # Lightning's step takes the gradients
        taken = np.maximum([0.0, *self.published[:-1]], self._done)
        when = np.concatenate([np.column_stack([forwarded, ends]).ravel(), taken])
        order = np.argsort(when, kind="stable")
        return when[order], *deltas[order].cumsum(axis=0).T

    @cached_property
    def _by_stage(self) -> list[list[SimulatedTask]]:
        found: list[list[SimulatedTask]] = [[] for _ in self.held]
        for span in self.spans:
            found[span.stage].append(span)
        return found

    @cached_property
    def _done(self) -> list[float]:
        """When each minibatch's last backward ended."""
        done = {span.minibatch: span.end for span in self._by_stage[0] if span.work is not Work.FORWARD}
        return [done[number] for number in range(1, len(done) + 1)]

    def busy(self, stage: int) -> float:
        """The fraction of all time in which ``stage`` computed."""
        return sum(span.end - span.start for span in self._by_stage[stage]) / self.published[-1]


def simulate(
    stages: Sequence[StageTimes],
    in_flight: int,
    minibatches: int,
    *,
    step: float = 0.0,
    wave: int | None = None,
    synchronise: float = 0.0,
    jitter: float = 0.0,
    seed: int = 0,
    visits: Visits | None = None,
    versions: Versions | None = None,
) -> Simulation:
    """Run ``minibatches`` through a pipeline that starts empty.

    Args:
        stages: k of them, one segment each; with ``visits``, the times of one visit to each segment.
        in_flight: Nm.
        minibatches: Their number, at least 1.
        step: Seconds of Lightning's thread for each.
        wave: W; by default Nm.
        synchronise: Seconds that Lightning's thread waits at the end of each wave.
        jitter: By how much tasks differ, as the standard deviation of the logarithm of their factors (about 0.05 for 5
            %); they are log-normal, and 1 on average.
        seed: Seed of the factors.
        visits: Of each minibatch; by default one to each stage.
        versions: Those that minibatches use; by default those of weight stashing.

    Raises:
        ValueError: for numbers that no pipeline has.
    """
    settings: dict[str, Any] = {"step": step, "wave": wave, "synchronise": synchronise, "jitter": jitter, "seed": seed}
    found = simulate_within(stages, in_flight, minibatches, None, **settings, visits=visits, versions=versions)
    assert found is not None, "a run without limits comes to its end"
    return found


def simulate_within(
    stages: Sequence[StageTimes],
    in_flight: int,
    minibatches: int,
    room: Sequence[float] | None,
    *,
    step: float = 0.0,
    wave: int | None = None,
    synchronise: float = 0.0,
    jitter: float = 0.0,
    seed: int = 0,
    visits: Visits | None = None,
    versions: Versions | None = None,
) -> Simulation | None:
    """Run as :func:`simulate` does; None as soon as a stage has forwarded more minibatches than it has ``room`` for.

    Args:
        room: For each stage, the most minibatches whose activations it may hold; None for no limits.
    """
    if not stages or in_flight < 1 or minibatches < 1 or (wave is not None and wave < 1) or jitter < 0:
        raise ValueError(
            f"{len(stages)} stages, Nm = {in_flight}, {minibatches} minibatches, W = {wave}, jitter = {jitter}"
        )
    visits = visits or Visits.once(len(stages))
    versions = versions or Versions(STASH, in_flight)
    return _Run(stages, visits, versions, minibatches, step, wave or in_flight, synchronise, jitter, seed).simulation(
        room
    )


@dataclass
class _Run:
    """State of a simulation."""

    times: Sequence[StageTimes]
    visits: Visits
    versions: Versions
    minibatches: int
    step: float
    wave: int
    synchronise: float
    jitter: float
    seed: int

    def __post_init__(self) -> None:
        self._route = route(self.visits.segments, self.visits.calls)
        self._calls = SimulatedCalls(self._route, self.visits.changing)
        self._complete: dict[int, float] = {}
        self._published: list[float] = []
        self._started = 0

    def simulation(self, room: Sequence[float] | None = None) -> Simulation | None:
        """Go from event to event. Ties are settled by the order in which events came up."""
        stage_of = [task.segment.stage for task in self._route]
        works = [task.work for task in self._route]
        seconds = [self.times[task.segment.index].of(task.work) for task in self._route]
        # Until the forward is done; of a backward, until it starts.
        forward = [
            0.0 if task.work is Work.BACKWARD else self.times[task.segment.index].of(Work.FORWARD)
            for task in self._route
        ]
        enters, leaves = self._edges(stage_of)
        limits = [
            math.inf if room is None or work is not Work.FORWARD else room[s]
            for s, work in zip(stage_of, works, strict=True)
        ]
        stages, last, ordered = max(stage_of) + 1, len(self._route) - 1, bool(self._calls)
        busy, held, most = [False] * stages, [0] * stages, [0] * stages
        queues: list[deque[tuple[int, int]]] = [deque() for _ in range(stages)]
        order = itertools.count()
        spans: list[SimulatedTask] = []
        # What comes up later: time, order, minibatch, instruction, and whether that ends, is done with its forward, or
        # becomes ready. What becomes ready now needs no heap.
        later: list[tuple[float, int, int, int, int]] = []
        ready: deque[tuple[int, int, int]] = deque()
        now = 0.0

        def begin(when: float, numbers: Iterable[int]) -> None:
            for number in numbers:
                heapq.heappush(later, (when, next(order), number, 0, _READY))

        begin(0.0, self._next())
        while later or ready:
            if ready and (not later or later[0][0] > now or later[0][1] > ready[0][0]):
                _, number, index = ready.popleft()
                event = _READY
            else:
                now, _, number, index, event = heapq.heappop(later)
            stage = stage_of[index]
            if event == _FORWARDED:
                if (following := self._calls.forwarded(number, index)) is not None:
                    ready.append((next(order), *following))
                continue
            if event == _READY:
                if ordered and not self._calls.admits(number, index):
                    continue
                if busy[stage]:
                    queues[stage].append((number, index))
                    continue
            else:
                if held[stage] > limits[index]:
                    return None
                held[stage] -= leaves[index]
                if index < last:
                    ready.append((next(order), number, index + 1))
                else:
                    for done, numbers in self._finished(now, number):
                        begin(done, numbers)
                if not queues[stage]:
                    busy[stage] = False
                    continue
                number, index = queues[stage].popleft()
            factor = self._factor(index, number)
            end, forwarded = now + factor * seconds[index], now + factor * forward[index]
            busy[stage] = True
            if enters[index]:
                held[stage] += 1
                most[stage] = max(most[stage], held[stage])
            if ordered and works[index] is not Work.BACKWARD:
                heapq.heappush(later, (forwarded, next(order), number, index, _FORWARDED))
            spans.append(SimulatedTask(stage, works[index], number, now, end, forwarded))
            heapq.heappush(later, (end, next(order), number, index, _ENDS))
        spans.sort(key=attrgetter("start", "stage"))
        return Simulation(tuple(spans), tuple(self._published), tuple(most))

    @staticmethod
    def _edges(stage_of: Sequence[int]) -> tuple[list[bool], list[bool]]:
        """Instructions of a route from whose start on a stage holds the minibatch, and at whose end it no longer does:
        the first one on each stage and the last."""
        places = range(len(stage_of))
        first, last = ({stage_of[n]: n for n in numbers} for numbers in (reversed(places), places))
        return [first[stage_of[n]] == n for n in places], [last[stage_of[n]] == n for n in places]

    def _factor(self, index: int, number: int) -> float:
        if not self.jitter:
            return 1.0
        task = self._route[index]
        drawn = random.Random(f"{self.seed} {task.segment.index} {task.work.value} {number}").gauss(0.0, self.jitter)
        return math.exp(drawn - self.jitter**2 / 2)

    def _finished(self, now: float, number: int) -> Iterator[tuple[float, range]]:
        """Let Lightning's thread go on as far as it can; yield when minibatches may start, and which."""
        self._complete[number] = now
        while (number := len(self._published) + 1) in self._complete:
            before = self._published[-1] if self._published else 0.0
            done = max(before, self._complete.pop(number)) + self.step
            if number % self.wave == 0:
                done += self.synchronise
            self._published.append(done)
            yield done, self._next()

    def _next(self) -> range:
        """Minibatches that there are weights for, and that have not started."""
        published, first = len(self._published), self._started + 1
        most = min(published + self.versions.in_flight, self.minibatches)
        while self._started < most and self.versions.version(self._started + 1) <= published:
            self._started += 1
        return range(first, self._started + 1)
