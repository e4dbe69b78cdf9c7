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
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_hetpipe.rules.call_order import CallOrder
from lightning_hetpipe.rules.schedule import Call, Segment, Work, calls, route, segments
from lightning_hetpipe.rules.versions import STASH, Versions


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


@dataclass(frozen=True)
class SimulatedTask:
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
        done = {span.minibatch: span.end for span in self.spans if span.stage == 0 and span.work is not Work.FORWARD}
        own = [span for span in self.spans if span.stage == stage]
        begins = {span.minibatch: span for span in reversed(own) if span.work is not Work.BACKWARD}
        ends = {span.minibatch: span for span in own if span.work is not Work.FORWARD}
        changes: list[tuple[float, int, int, int]] = []
        for span in own:
            changes.append((span.forwarded, int(begins.get(span.minibatch) is span), 0, 1))
            changes.append((span.end, *((-1, 1) if ends.get(span.minibatch) is span else (0, 0)), -1))
        for number, before in enumerate([0.0, *self.published[:-1]], start=1):
            changes.append((max(before, done[number]), 0, -1, 0))  # Lightning's step takes them
        held = waiting = whole = 0
        for when, more, wait, computed in sorted(changes, key=lambda change: change[0]):
            held, waiting, whole = held + more, waiting + wait, whole + computed
            yield when, StageLoad(held, waiting, whole)

    def busy(self, stage: int) -> float:
        """The fraction of all time in which ``stage`` computed."""
        return sum(span.end - span.start for span in self.spans if span.stage == stage) / self.published[-1]


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
    if not stages or in_flight < 1 or minibatches < 1 or (wave is not None and wave < 1) or jitter < 0:
        raise ValueError(
            f"{len(stages)} stages, Nm = {in_flight}, {minibatches} minibatches, W = {wave}, jitter = {jitter}"
        )
    visits = visits or Visits.once(len(stages))
    versions = versions or Versions(STASH, in_flight)
    return _Run(stages, visits, versions, minibatches, step, wave or in_flight, synchronise, jitter, seed).simulation()


@dataclass
class _Stage:
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    """Ready tasks: minibatch, and which instruction of the route."""
    busy: bool = False
    held: Counter[int] = field(default_factory=Counter)
    """Visits whose activations it holds, by minibatch."""
    most: int = 0


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
        self._stages = [_Stage() for _ in {segment.stage for segment in self.visits.segments}]
        self._orders = {segment: CallOrder[tuple[int, int]]() for segment in self.visits.changing}
        # Time, order, minibatch, instruction that is now ready; its complement where its forward is done.
        self._events: list[tuple[float, int, int, int]] = []
        self._order = itertools.count()
        self._ends: list[tuple[float, int, int, int]] = []
        self._spans: list[SimulatedTask] = []
        self._complete: dict[int, float] = {}
        self._published: list[float] = []
        self._started = 0

    def simulation(self) -> Simulation:
        self._begin(0.0)
        while self._events or self._ends:
            # What ends frees its stage before what becomes ready at the same moment asks for one.
            if self._ends and (not self._events or self._ends[0][:2] <= self._events[0][:2]):
                now, _, number, index = heapq.heappop(self._ends)
                self._ended(now, number, index)
            else:
                now, _, number, index = heapq.heappop(self._events)
                if index < 0:
                    self._forwarded(now, number, ~index)
                elif self._admits(number, index):
                    stage = self._segment(index).stage
                    self._stages[stage].queue.append((number, index))
                    self._start(now, stage)
        return Simulation(
            tuple(sorted(self._spans, key=lambda span: (span.start, span.stage))),
            tuple(self._published),
            tuple(stage.most for stage in self._stages),
        )

    def _segment(self, index: int) -> Segment:
        return self._route[index].segment

    def _admits(self, number: int, index: int) -> bool:
        """Tell whether the task is ready; a forward may have to wait for another minibatch's last call."""
        task = self._route[index]
        order = self._orders.get(task.segment.index)
        if order is None or task.work is Work.BACKWARD or not (task.call.again or task.call.ordinal):
            return True
        return order.admits(number, (number, index))

    def _forwarded(self, now: float, number: int, index: int) -> None:
        """The forward of the task is done: where it was the last call, the next minibatch is ready."""
        task = self._route[index]
        order = self._orders.get(task.segment.index)
        if order is None or task.call.again or not task.call.ordinal:
            return
        if (following := order.close(number)) is not None:
            self._ready(now, *following)

    def _ready(self, when: float, number: int, index: int) -> None:
        heapq.heappush(self._events, (when, next(self._order), number, index))

    def _start(self, now: float, index: int) -> None:
        stage = self._stages[index]
        if stage.busy or not stage.queue:
            return
        number, instruction = stage.queue.popleft()
        work, segment = self._route[instruction].work, self._segment(instruction).index
        times, factor = self.times[segment], self._factor(segment, work, number)
        end = now + factor * times.of(work)
        forwarded = {Work.FORWARD: end, Work.BACKWARD: now}.get(work, now + factor * times.of(Work.FORWARD))
        stage.busy = True
        if work is not Work.BACKWARD:
            stage.held[number] += 1
            stage.most = max(stage.most, len(stage.held))
            if self._orders:
                heapq.heappush(self._events, (forwarded, next(self._order), number, ~instruction))
        self._spans.append(SimulatedTask(index, work, number, now, end, forwarded))
        heapq.heappush(self._ends, (end, next(self._order), number, instruction))

    def _ended(self, now: float, number: int, index: int) -> None:
        instruction = self._route[index]
        here = instruction.segment.stage
        stage = self._stages[here]
        stage.busy = False
        if instruction.work is not Work.FORWARD:
            stage.held[number] -= 1
            if not stage.held[number]:
                del stage.held[number]
        if index + 1 < len(self._route):
            self._ready(now, number, index + 1)
        else:
            self._complete[number] = now
            self._publish()
        self._start(now, here)

    def _factor(self, segment: int, work: Work, number: int) -> float:
        if not self.jitter:
            return 1.0
        drawn = random.Random(f"{self.seed} {segment} {work.value} {number}").gauss(0.0, self.jitter)
        return math.exp(drawn - self.jitter**2 / 2)

    def _publish(self) -> None:
        """Let Lightning's thread go on as far as it can."""
        while (number := len(self._published) + 1) in self._complete:
            before = self._published[-1] if self._published else 0.0
            done = max(before, self._complete.pop(number)) + self.step
            if number % self.wave == 0:
                done += self.synchronise
            self._published.append(done)
            self._begin(done)

    def _begin(self, now: float) -> None:
        """Start the minibatches that there are weights for."""
        published = len(self._published)
        last = min(published + self.versions.ahead(published), self.minibatches)
        for number in range(self._started + 1, last + 1):
            self._ready(now, number, 0)
        self._started = max(self._started, last)
