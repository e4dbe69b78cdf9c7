"""Run of one virtual worker's pipeline within the simulation of a cluster.

It goes on until Lightning's thread has ended a wave, as the rest of the cluster says when the synchronisation is over;
until then nothing outside matters. Only where its stages lie on several nodes, or on a device that has stages of other
virtual workers, do others slow it down at any time: then it goes on no further than to the present.

Stages, minibatches and Lightning's thread do what :mod:`~lightning_hetpipe.planning.model.simulate` says, with the same
ties: events at one time are handled in the order in which they came to be known.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_hetpipe.planning.model.shared_device import SharedDevice
from lightning_hetpipe.planning.model.simulate import StageTimes, Visits
from lightning_hetpipe.planning.model.simulated_calls import SimulatedCalls
from lightning_hetpipe.rules.schedule import Work, route

ROWS = 32
"""Minibatches for which factors of tasks are drawn at once."""

_ENDED, _READY, _FORWARDED = range(3)


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
    """A virtual worker.

    Attributes:
        stages: Times of each stage, or with ``visits`` of one visit to each segment. Of what ``forwards`` and
            ``gradients`` take, they have the latency only.
        wave: W_v.
        step: Seconds of Lightning's thread for each minibatch.
        visits: Of each minibatch; by default one to each stage.
        forwards: What the forward of a segment receives over the network, by the segment's index.
        gradients: The same for its backward.
        weights: Its weights, by where they lie.
        devices: Devices that have stages of other virtual workers, too, by the index of the stage there.
    """

    stages: Sequence[StageTimes]
    wave: int
    step: float = 0.0
    visits: Visits | None = None
    forwards: Mapping[int, Crossing] = field(default_factory=dict)
    gradients: Mapping[int, Crossing] = field(default_factory=dict)
    weights: Sequence[PlacedWeights] = ()
    devices: Mapping[int, Hashable] = field(default_factory=dict)


class PipelineRun:
    """State of the run.

    Args:
        given: The virtual worker.
        last: Number of its minibatches.
        ahead: Gives how many minibatches may be in flight after a version.
        synchronises: Whether its waves end with a synchronisation.
        rows: Seconds of each task of the route, minibatch by minibatch.
        wait: Waits for a transfer or for a device, given the time, and what to call with the time at which the one is
            over or the other is free.
        devices: Devices of stages that are other virtual workers', too.

    Attributes:
        published: When version p came to be, for p = 1, 2, ...
        wave_end: When Lightning's thread came to the end of a wave, while it synchronises; None otherwise.
        shares: Whether its stages share links, or a device, with others.
    """

    def __init__(
        self,
        given: WorkerPipeline,
        last: int,
        ahead: Callable[[int], int],
        synchronises: bool,
        rows: Iterator[list[float]],
        wait: Callable[[float, Crossing | SharedDevice, Callable[[float], None]], None],
        devices: Mapping[int, SharedDevice],
    ) -> None:
        self.published: list[float] = []
        self.wave_end: float | None = None
        self._wave, self._step, self._last = given.wave, given.step, last
        self._ahead, self._synchronises, self._rows, self._wait = ahead, synchronises, rows, wait
        visits = given.visits or Visits.once(len(given.stages))
        self._route = route(visits.segments, visits.calls)
        self._stage = [task.segment.stage for task in self._route]
        self._forward = [given.stages[task.segment.index].of(Work.FORWARD) for task in self._route]
        self._seconds = task_seconds(given)
        received = [given.gradients if task.work is Work.BACKWARD else given.forwards for task in self._route]
        self._crossings = [each.get(task.segment.index) for each, task in zip(received, self._route, strict=True)]
        self._devices = [devices.get(stage) for stage in self._stage]
        self.shares = any(self._crossings) or bool(devices)
        self._calls = SimulatedCalls(self._route, visits.changing)
        self._ordered = bool(self._calls)
        stages = max(self._stage) + 1
        self._queues: list[deque[tuple[int, int]]] = [deque() for _ in range(stages)]
        """Ready tasks of each stage: minibatch, and which task of the route."""
        self._busy = [False] * stages
        self._row: dict[int, list[float]] = {}
        """Seconds of each task of the minibatches that have started."""
        self._complete: deque[float] = deque()
        """When minibatches were complete that Lightning's thread has not taken yet."""
        self._started = 0
        self._now = 0.0
        self._number = itertools.count().__next__
        self._events: list[tuple[float, int, int, int, int]] = []
        """Events to come: time, number of the event, kind, minibatch, task."""
        self._ready: deque[tuple[int, int, int]] = deque()
        """Tasks that are ready now: number of the event, minibatch, task."""
        self._begin(0.0)

    @property
    def next(self) -> float | None:
        """Time of the next event; None if there is none."""
        return self._events[0][0] if self._events else None

    def advance(self, until: float = math.inf) -> None:
        """Go on to the end of a wave, or where others slow it down up to ``until``."""
        events, ready, pop = self._events, self._ready, heapq.heappop
        while self.wave_end is None or self.shares:
            if ready and (not events or events[0][0] > self._now or events[0][1] > ready[0][0]):
                self._admit(*ready.popleft()[1:])
            elif events and events[0][0] <= until:
                self._now, _, kind, number, task = pop(events)
                if kind == _ENDED:
                    self._ended(number, task)
                elif kind == _READY:
                    self._admit(number, task)
                elif (following := self._calls.forwarded(number, task)) is not None:
                    ready.append((self._number(), *following))
            else:
                return

    def synchronised(self, now: float) -> None:
        """End the synchronisation: the version at the wave's end is there."""
        self.wave_end = None
        self.published.append(now)
        self._begin(now)
        self._publish()

    def _at(self, when: float, kind: int, number: int, task: int) -> None:
        heapq.heappush(self._events, (when, self._number(), kind, number, task))

    def _begin(self, now: float) -> None:
        """Start the minibatches that there are weights for."""
        published = len(self.published)
        last = min(published + self._ahead(published), self._last)
        for number in range(self._started + 1, last + 1):
            self._row[number] = next(self._rows)
            self._at(now, _READY, number, 0)
        self._started = max(self._started, last)

    def _admit(self, number: int, task: int) -> None:
        """Line up a task that is ready; a forward may have to wait for another minibatch's last call."""
        if self._ordered and not self._calls.admits(number, task):
            return
        stage = self._stage[task]
        if self._busy[stage]:
            self._queues[stage].append((number, task))
        else:
            self._busy[stage] = True
            self._start(number, task)

    def _start(self, number: int, task: int) -> None:
        if crossing := self._crossings[task]:
            self._wait(self._now, crossing, lambda when: self._received(when, number, task))
        else:
            self._received(self._now, number, task)

    def _received(self, now: float, number: int, task: int) -> None:
        if device := self._devices[task]:
            self._wait(now, device, lambda when: self._compute(when, number, task))
        else:
            self._compute(now, number, task)

    def _compute(self, now: float, number: int, task: int) -> None:
        took = self._row[number][task]
        if self._ordered and self._route[task].work is not Work.BACKWARD:
            usual = self._seconds[task]
            factor = took / usual if usual else 1.0
            self._at(now + factor * self._forward[task], _FORWARDED, number, task)
        heapq.heappush(self._events, (now + took, self._number(), _ENDED, number, task))

    def _ended(self, number: int, task: int) -> None:
        if device := self._devices[task]:
            device.free(self._now)
        if task + 1 < len(self._stage):
            self._ready.append((self._number(), number, task + 1))
        else:
            del self._row[number]
            self._complete.append(self._now)
            if self.wave_end is None:
                self._publish()
        stage = self._stage[task]
        if queue := self._queues[stage]:
            self._start(*queue.popleft())
        else:
            self._busy[stage] = False

    def _publish(self) -> None:
        """Let Lightning's thread go on as far as it can."""
        while self._complete:
            before = self.published[-1] if self.published else 0.0
            done = max(before, self._complete.popleft()) + self._step
            if self._synchronises and (len(self.published) + 1) % self._wave == 0:
                self.wave_end = done
                return
            self.published.append(done)
            self._begin(done)


def task_seconds(given: WorkerPipeline) -> list[float]:
    """Seconds of each task of the route, without what it receives over the network."""
    visits = given.visits or Visits.once(len(given.stages))
    return [given.stages[task.segment.index].of(task.work) for task in route(visits.segments, visits.calls)]


def rows(seconds: Sequence[float], jitter: float, seed: int, worker: int) -> Iterator[list[float]]:
    """The seconds of each task, minibatch by minibatch, with factors drawn for ``seed`` and ``worker``.

    The factors are log-normal, and 1 on average; ``jitter`` is the standard deviation of their logarithm.
    """
    if not jitter:
        yield from itertools.repeat([*seconds])
    generator, usual = np.random.Generator(np.random.Philox(key=[seed % 2**64, worker])), np.array(seconds)
    while True:
        drawn = generator.standard_normal((ROWS, len(usual)))
        yield from (usual * np.exp(jitter * drawn - jitter**2 / 2)).tolist()
