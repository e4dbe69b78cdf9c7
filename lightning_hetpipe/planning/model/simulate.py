"""Simulation of one virtual worker, under the schedule that the engine interprets.

Time moves from event to event, so a run of hours takes no longer than its number of tasks. The rules:

- Each stage runs its tasks first in, first out, in the order in which they become ready (law L2). The tasks of a
  minibatch are given by :func:`~lightning_hetpipe.rules.schedule.route`. A segment that is visited several times and
  changes buffers takes minibatches one by one (:class:`~lightning_hetpipe.rules.schedule.CallOrder`).
- Minibatch p starts when the version that it uses is published: p - Nm under weight stashing. The first Nm start at
  once (law L1).
- A transfer is part of the task that receives it, as in the engine. So a link keeps its receiver busy, and counts
  towards T_max.
- Lightning's thread takes minibatches in order. Each step lasts ``step`` seconds (hooks, optimizer). A step that ends a
  wave lasts another ``synchronise`` seconds (law L3), in which the pipeline goes on with minibatches in flight.
- With ``jitter`` the time of each task is multiplied by a factor, drawn from ``seed``, virtual worker, minibatch and
  task.
- Events at one time are handled in the order in which they were scheduled.

:func:`simulate` runs one virtual worker to its end. In a cluster (:mod:`.cluster_simulation`) each :class:`PipelineRun`
goes on until Lightning's thread has ended a wave, and the cluster ends the synchronisation. If stages share links or a
device with other virtual workers, their run advances only up to the present.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_hetpipe.rules.schedule import Call, CallOrder, Segment, Work, calls, route, segments
from lightning_hetpipe.rules.versions import STASH, Versions

ROWS = 32
"""Number of minibatches for which factors of tasks are drawn at once."""

_ENDED, _READY, _FORWARDED = range(3)


@dataclass(frozen=True)
class Visits:
    """Visits of a minibatch to stages, if modules are called several times or a stage has parts of several modules.

    ``changing`` has the indices of the segments whose forwards change buffers.
    """

    segments: Sequence[Segment]
    calls: Sequence[Call]
    changing: Collection[int] = ()


@dataclass(frozen=True)
class StageTimes:
    """Seconds that a stage takes for one minibatch, or a segment of it for one visit.

    Attributes:
        forward, backward: Computation of the layers.
        receive: Transfer of the output of the stage before.
        loss: User code between forward and backward, on the last stage.
        receive_gradient: Transfer of the gradient from the stage behind.
    """

    forward: float
    backward: float
    receive: float = 0.0
    loss: float = 0.0
    receive_gradient: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of everything that a minibatch takes here. T_max is the total of the slowest stage."""
        return self.receive + self.forward + self.loss + self.receive_gradient + self.backward

    def of(self, work: Work) -> float:
        """Return the seconds of one task. On the last stage forward, loss and backward are one task."""
        if work is Work.FORWARD:
            return self.receive + self.forward
        return self.receive_gradient + self.backward if work is Work.BACKWARD else self.total


class StageLoad(NamedTuple):
    """Minibatches that a stage holds at one time.

    Attributes:
        held: Number of minibatches whose activations are held, from the end of a forward to the end of its backward.
        waiting: Number of minibatches whose gradients wait for Lightning's step after their backward.
        whole: 1 while the stage computes a held minibatch, else 0. With recomputation the others keep only their
            inputs.
    """

    held: int
    waiting: int
    whole: int = 1


class SimulatedTask(NamedTuple):
    """Task of a stage from ``start`` to ``end``, in seconds since the pipeline started.

    ``forwarded`` is the end of the task's forward. For a backward alone it is the start.
    """

    stage: int
    work: Work
    minibatch: int
    start: float
    end: float
    forwarded: float


TaskFields: TypeAlias = tuple[int, Work, int, float, float, float]
"""Fields of a :class:`SimulatedTask`. The planner makes millions of them."""


@dataclass(frozen=True)
class Crossing:
    """Bytes that a visit to a segment receives over the network, from node ``source`` to node ``target``."""

    nbytes: float
    source: int
    target: int


@dataclass(frozen=True)
class PlacedWeights:
    """Bytes of weights that the stages of a virtual worker on node ``node`` push to and pull from server ``server``."""

    node: int
    server: int
    nbytes: int


@dataclass(frozen=True)
class WorkerPipeline:
    """A virtual worker, as the simulation needs it.

    Attributes:
        stages: Times of each stage, or with ``visits`` of one visit to each segment. For transfers in ``forwards`` and
            ``gradients``, these times have the latency only.
        step: Seconds of Lightning's thread for each minibatch.
        visits: Visits of each minibatch, by default one to each stage.
        forwards, gradients: Transfers over the network that a segment's forward or backward receives, by segment.
        devices: Devices that also have stages of other virtual workers, by the index of this virtual worker's stage.
    """

    stages: Sequence[StageTimes]
    wave: int
    step: float = 0.0
    visits: Visits | None = None
    forwards: Mapping[int, Crossing] = field(default_factory=dict)
    gradients: Mapping[int, Crossing] = field(default_factory=dict)
    weights: Sequence[PlacedWeights] = ()
    devices: Mapping[int, Hashable] = field(default_factory=dict)


@dataclass(frozen=True)
class Simulation:
    """Result of a simulated run.

    ``tasks`` are in the order of their starts. ``published`` has the second of each version 1, 2, ... For each stage,
    ``held`` is the largest number of minibatches whose activations it held at once.
    """

    tasks: Sequence[TaskFields]
    published: tuple[float, ...]
    held: tuple[int, ...]

    @cached_property
    def spans(self) -> tuple[SimulatedTask, ...]:
        """All tasks, sorted by start."""
        return tuple(map(SimulatedTask._make, sorted(self.tasks, key=itemgetter(3, 0))))

    def heaviest(self, stage: int) -> list[StageLoad]:
        """Return the loads of ``stage`` that can be the heaviest: for each held and computed count, most waiting."""
        _, held, waiting, whole = self._changes(stage)
        base = int(waiting.max()) + 1
        codes = np.unique((2 * held + whole) * base + waiting)
        codes = codes[np.append(codes[1:] // base != codes[:-1] // base, True)]
        return [StageLoad(code // base // 2, code % base, code // base % 2) for code in codes.tolist()]

    def _changes(self, stage: int) -> tuple[NDArray[Any], ...]:
        """Return when the load of ``stage`` changes, and the minibatches held, waiting and computed after that."""
        _, works, numbers, _, ends, forwarded = zip(*self._by_stage[stage], strict=True)
        backward, forward = (np.array([work is each for work in works]) for each in (Work.BACKWARD, Work.FORWARD))
        minibatch, count = np.array(numbers), len(works)
        # A minibatch is held from its first forward, and its gradients wait from the end of its last backward.
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
    def _by_stage(self) -> list[list[TaskFields]]:
        found: list[list[TaskFields]] = [[] for _ in self.held]
        for task in self.tasks:
            found[task[0]].append(task)
        return found

    @cached_property
    def _done(self) -> list[float]:
        done = {number: end for _, work, number, _, end, _ in self._by_stage[0] if work is not Work.FORWARD}
        return [done[number] for number in range(1, len(done) + 1)]


def simulate(
    stages: Sequence[StageTimes],
    in_flight: int,
    minibatches: int,
    *,
    step: float = 0.0,
    synchronise: float = 0.0,
    visits: Visits | None = None,
    versions: Versions | None = None,
) -> Simulation:
    """Simulate ``minibatches`` (at least 1) in a pipeline of ``stages`` that starts empty.

    Args:
        stages: Times of each stage, which has one segment. With ``visits``, times of one visit to each segment.
        step: Seconds of Lightning's thread for each minibatch.
        synchronise: Seconds that Lightning's thread waits at the end of each wave of Nm minibatches.
        visits: Visits of each minibatch, by default one to each stage.
        versions: Weight versions that minibatches use, by default the versions of weight stashing.

    Raises:
        ValueError: if a number is out of its range.
    """
    if not stages or in_flight < 1 or minibatches < 1:
        raise ValueError(f"{len(stages)} stages, Nm = {in_flight}, {minibatches} minibatches")
    given, tasks = WorkerPipeline(stages, in_flight, step, visits), list[TaskFields]()
    versions = versions or Versions(STASH, in_flight)
    run = PipelineRun(given, versions, minibatches, synchronise=synchronise, tasks=tasks)
    run.advance()
    return Simulation(tasks, tuple(run.published), tuple(run.held))


class SharedDevice:
    """Device with stages of several virtual workers, which computes their tasks one by one as they come.

    A stage has at most one task there at a time, so virtual workers take turns.
    """

    __slots__ = ("_busy", "_waiting")

    def __init__(self) -> None:
        self._busy = False
        self._waiting: deque[Callable[[float], None]] = deque()

    def take(self, now: float, start: Callable[[float], None]) -> None:
        """Call ``start`` with the time, ``now`` or later, at which the caller gets the device."""
        if self._busy:
            self._waiting.append(start)
        else:
            self._busy = True
            start(now)

    def free(self, now: float) -> None:
        """End the running task and start the next one."""
        if self._waiting:
            self._waiting.popleft()(now)
        else:
            self._busy = False


class PipelineRun:
    """State of the run of one virtual worker over ``last`` minibatches.

    Args:
        jitter: Standard deviation of the logarithm of the tasks' log-normal factors, which have mean 1. 0.05 is about
            5%.
        seed: Seed of the factors, and the number of the virtual worker.
        synchronise: Seconds that a wave's end waits. If None, it waits until :meth:`synchronised` is called.
        wait: Function that waits for a transfer or a device. It is given the time, and a callback for the time at which
            the transfer is over or the device is free.
        devices: Devices that other virtual workers share, by stage.
        tasks: List to which the fields of each task are appended, if given.

    Attributes:
        published, held: As in :class:`Simulation`.
        wave_end: Time at which Lightning's thread came to the end of a wave, while it synchronises. Otherwise None.
        shares: Whether the stages share links or a device with other virtual workers.
    """

    def __init__(
        self,
        given: WorkerPipeline,
        versions: Versions,
        last: int,
        jitter: float = 0.0,
        seed: tuple[int, int] = (0, 0),
        *,
        synchronise: float | None = 0.0,
        wait: Callable[[float, Crossing | SharedDevice, Callable[[float], None]], None] | None = None,
        devices: Mapping[int, SharedDevice] | None = None,
        tasks: list[TaskFields] | None = None,
    ) -> None:
        count, devices = len(given.stages), devices or {}
        visits = given.visits or Visits(segments([count], range(count)), calls([0]))
        path = route(visits.segments, visits.calls)
        self.published: list[float] = []
        self.wave_end: float | None = None
        self._wave, self._step, self._last, self._versions = given.wave, given.step, last, versions
        self._synchronise, self._wait, self._tasks = synchronise, wait, tasks
        # By task of the route:
        self._stage = stage = [task.segment.stage for task in path]
        self._work = [task.work for task in path]
        self._seconds = [given.stages[task.segment.index].of(task.work) for task in path]
        self._forward = [  # until the forward is done; of a backward, until it starts
            0.0 if task.work is Work.BACKWARD else given.stages[task.segment.index].of(Work.FORWARD) for task in path
        ]
        received = [given.gradients if task.work is Work.BACKWARD else given.forwards for task in path]
        self._crossings = [each.get(task.segment.index) for each, task in zip(received, path, strict=True)]
        self._devices = [devices.get(each) for each in stage]
        self.shares = any(self._crossings) or bool(devices)
        # A stage holds a minibatch from the start of its first task there to the end of the last one.
        places = range(len(path))
        enters, leaves = ({stage[n]: n for n in numbers} for numbers in (reversed(places), places))
        self._enters, self._leaves = ([each[stage[n]] == n for n in places] for each in (enters, leaves))
        orders = {segment: CallOrder[tuple[int, int]]() for segment in visits.changing}
        waits = [task.work is not Work.BACKWARD and (task.call.again or task.call.ordinal > 0) for task in path]
        self._orders = [orders.get(task.segment.index) if own else None for own, task in zip(waits, path, strict=True)]
        self._closes = [
            order is not None and not task.call.again for order, task in zip(self._orders, path, strict=True)
        ]
        # By stage:
        stages = max(stage) + 1
        self.held, self._holds, self._busy = [0] * stages, [0] * stages, [False] * stages
        self._queues: list[deque[tuple[int, int]]] = [deque() for _ in range(stages)]
        """Ready tasks of each stage: minibatch, and index of the task in the route."""
        self._draw = factors(jitter, seed, len(path)) if jitter else None
        self._factors: dict[int, list[float]] = {}
        """Factors of the tasks of each minibatch that has started."""
        self._complete: deque[float] = deque()
        """Times at which minibatches were complete that Lightning's thread has not taken yet."""
        self._started = 0
        self._now = 0.0
        self._number = itertools.count().__next__
        self._events: list[tuple[float, int, int, int, int]] = []
        """Future events: time, number of the event, kind, minibatch, task."""
        self._ready: deque[tuple[int, int, int]] = deque()
        """Tasks that are ready now: number of the event, minibatch, task."""
        self._begin(0.0)

    @property
    def next(self) -> float | None:
        """Time of the next event, or None."""
        return self._events[0][0] if self._events else None

    def advance(self, until: float = math.inf) -> None:
        """Advance to the end of a wave, or up to ``until`` if other virtual workers can slow this one down."""
        events, ready, number_of, pop = self._events, self._ready, self._number, heapq.heappop
        stages, orders, leaves, devices = self._stage, self._orders, self._leaves, self._devices
        queues, busy, holds = self._queues, self._busy, self._holds
        last = len(stages) - 1
        while self.wave_end is None or self.shares:
            if ready and (not events or events[0][0] > self._now or events[0][1] > ready[0][0]):
                _, number, task = ready.popleft()
                kind = _READY
            elif events and events[0][0] <= until:
                self._now, _, kind, number, task = pop(events)
            else:
                return
            stage, order = stages[task], orders[task]
            if kind == _READY:
                if order is not None and not order.admits(number, (number, task)):
                    continue
                if busy[stage]:
                    queues[stage].append((number, task))
                    continue
                busy[stage] = True
            elif kind == _ENDED:
                if device := devices[task]:
                    device.free(self._now)
                holds[stage] -= leaves[task]
                if task < last:
                    ready.append((number_of(), number, task + 1))
                else:
                    self._factors.pop(number, None)
                    self._complete.append(self._now)
                    if self.wave_end is None:
                        self._publish()
                if not queues[stage]:
                    busy[stage] = False
                    continue
                number, task = queues[stage].popleft()
            else:
                if order is not None and (following := order.close(number)) is not None:
                    ready.append((number_of(), *following))
                continue
            if self._enters[task]:
                holds[stage] += 1
                self.held[stage] = max(self.held[stage], holds[stage])
            if self.shares:
                self._receive(number, task)
            else:
                self._compute(self._now, number, task)

    def synchronised(self, now: float) -> None:
        """End the synchronisation: publish the version at the wave's end."""
        self.wave_end = None
        self.published.append(now)
        self._begin(now)
        self._publish()

    def _begin(self, now: float) -> None:
        """Start the minibatches for which there are weights."""
        published = len(self.published)
        most = min(published + self._versions.in_flight, self._last)
        while self._started < most and self._versions.version(self._started + 1) <= published:
            self._started += 1
            if self._draw is not None:
                self._factors[self._started] = next(self._draw)
            heapq.heappush(self._events, (now, self._number(), _READY, self._started, 0))

    def _receive(self, number: int, task: int) -> None:
        if (crossing := self._crossings[task]) is not None:
            assert self._wait is not None
            self._wait(self._now, crossing, lambda when: self._received(when, number, task))
        else:
            self._received(self._now, number, task)

    def _received(self, now: float, number: int, task: int) -> None:
        if device := self._devices[task]:
            assert self._wait is not None
            self._wait(now, device, lambda when: self._compute(when, number, task))
        else:
            self._compute(now, number, task)

    def _compute(self, now: float, number: int, task: int) -> None:
        factor = self._factors[number][task] if self._factors else 1.0
        end, forwarded = now + factor * self._seconds[task], now + factor * self._forward[task]
        if self._closes[task]:
            heapq.heappush(self._events, (forwarded, self._number(), _FORWARDED, number, task))
        if self._tasks is not None:
            self._tasks.append((self._stage[task], self._work[task], number, now, end, forwarded))
        heapq.heappush(self._events, (end, self._number(), _ENDED, number, task))

    def _publish(self) -> None:
        """Let Lightning's thread go on as far as it can."""
        while self._complete:
            before = self.published[-1] if self.published else 0.0
            done = max(before, self._complete.popleft()) + self._step
            if (len(self.published) + 1) % self._wave == 0:
                if self._synchronise is None:
                    self.wave_end = done
                    return
                done += self._synchronise
            self.published.append(done)
            self._begin(done)


def factors(jitter: float, seed: tuple[int, int], tasks: int) -> Iterator[list[float]]:
    """Yield factors of the ``tasks`` of each minibatch: log-normal, with mean 1."""
    generator = np.random.Generator(np.random.Philox(key=[seed[0] % 2**64, seed[1]]))
    while True:
        yield from np.exp(jitter * generator.standard_normal((ROWS, tasks)) - jitter**2 / 2).tolist()
