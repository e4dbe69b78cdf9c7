"""Pace of a virtual worker: minibatches per second that it would make if it never waited for others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning_hetpipe.pipeline.user.batch_in_flight import BatchInFlight
from lightning_hetpipe.run.lifecycle import Extension

FEWEST = 2
"""Minibatches on which a pace can be based."""


@dataclass(eq=False)
class Pace(Extension):
    """Measures an epoch. Its first minibatch does not count, which fills the pipeline, or is watched.

    While Lightning's thread pauses (waits for others, evaluates, saves), what is in flight goes on. So only the time
    counts as lost in which nothing moved, and with it the time that the pipeline takes to fill again: from the end of
    the last minibatch in flight to the end of the first one that comes after, which is not counted either.

    Attributes:
        in_flight: Gives the minibatches in flight.
        now: Gives the time in seconds, as minibatches have it.
    """

    in_flight: Callable[[], Iterable[BatchInFlight]]
    now: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self.epoch_begins(1)

    def epoch_begins(self, first: int) -> None:
        self._first: float | None = None
        self._seconds = 0.0  # up to the last step
        self._minibatches = 0
        self._lost = 0.0
        self._paused = False
        self._resumed_at = 0.0
        self._awaited = 0  # the minibatch with which the pipeline is full again

    def stepped(self, version: int) -> None:
        """Count a minibatch, whose step is over."""
        now = self.now()
        if self._first is None:
            self._first = now
        else:
            self._minibatches += 1
        self._seconds = now - self._first - self._lost

    def finished(self, minibatch: BatchInFlight, args: Sequence[Any]) -> None:
        """Note when ``minibatch`` was done, which is before Lightning's thread takes it."""
        if minibatch.number == self._awaited:
            self._awaited = 0
            self._lost += minibatch.ended_at - self._resumed_at
            self._minibatches -= 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Lightning's thread does something else than training; within another pause it is part of that."""
        if self._paused:
            yield
            return
        start, self._paused = self.now(), True
        try:
            yield
        finally:
            self._paused = False
            self._count_pause(start)

    def _count_pause(self, start: float) -> None:
        if self._first is None or self._awaited:
            return
        flying = list(self.in_flight())
        if all(minibatch.ended for minibatch in flying):
            self._resumed_at = self.now()
            self._lost += self._resumed_at - max([start, *(minibatch.ended_at for minibatch in flying)])
            self._awaited = max((minibatch.number for minibatch in flying), default=-1) + 1

    @property
    def rate(self) -> float | None:
        """Minibatches per second of the epoch so far; None if there are too few."""
        if self._first is None or self._minibatches < FEWEST:
            return None
        return self._minibatches / self._seconds if self._seconds > 0 else None
