"""Telemetry of a fit: metrics on the Trainer's loggers while it runs, the report at its end, and the pace.

The pace is the minibatches per second that a virtual worker would make if it never waited for other virtual workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L

from lightning_hetpipe.lightning_private import begun_minibatches
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.user.minibatch import Minibatch
from lightning_hetpipe.placement.layout import Layout
from lightning_hetpipe.reporting.report import Meter, RunReport
from lightning_hetpipe.run.lifecycle import Extension


class Metered(Extension):
    """An extension whose ``meter`` counts the time of training: epochs without their evaluations."""

    meter: Meter

    def epoch_begins(self, first: int) -> None:
        self.meter.start()

    @contextmanager
    def evaluating(self, minibatch: int) -> Iterator[None]:
        self.meter.stop()
        try:
            yield
        finally:
            self.meter.start()

    def epoch_ends(self) -> None:
        self.meter.stop()


@dataclass(eq=False)
class Telemetry(Metered):
    """A count of the minibatches of ``engine`` for the loggers of ``trainer``. ``synchronisation`` returns the metrics
    of the virtual workers' synchronisation."""

    trainer: L.Trainer
    engine: Engine
    layout: Layout
    synchronisation: Callable[[], Mapping[str, float]] = dict
    _staleness = _logged = 0

    def __post_init__(self) -> None:
        self.meter = Meter(len(self.engine.stages))

    def finished(self, minibatch: Minibatch, args: Sequence[Any]) -> None:
        self.meter.count(args[0] if args else None, minibatch.seconds)
        self._staleness = self.engine.versions.steps(minibatch.number)

    def published(self, version: int) -> None:
        self._log(version)

    def epoch_ends(self) -> None:
        super().epoch_ends()
        self._log(begun_minibatches(self.trainer)[0])

    def _log(self, number: int) -> None:
        """Log the metrics after minibatch ``number``, at the Trainer's interval, once a minibatch was counted."""
        every: int = getattr(self.trainer, "log_every_n_steps", 0)  # set by a connector, without declaring it
        if not every or number % every or number == self._logged or not self.meter.minibatches:
            return
        self._logged = number
        metrics = self.meter.interval([stage.stream.busy_seconds() for stage in self.engine.stages])
        for index, stage in enumerate(self.engine.stages):
            metrics[f"hetpipe/stage_{index}/memory_bytes"] = float(stage.memory.most_lately())
        metrics["hetpipe/staleness"] = float(self._staleness)
        metrics.update(self.synchronisation())
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=max(0, self.trainer.global_step - 1))  # as Lightning counts them

    def report(self) -> RunReport:
        return self.layout.report(self.engine, self.meter)


FEWEST = 2
"""Smallest number of minibatches for a pace."""


@dataclass(eq=False)
class Pace(Extension):
    """A measurement of an epoch without its first minibatch, which fills the pipeline or is watched.

    Minibatches in flight go on while Lightning's thread pauses (waits for others, evaluates, saves). So a pause costs
    only the time in which nothing moved, and the time in which the pipeline fills again: from the end of the last
    minibatch in flight to the end of the first one after it. That minibatch is not counted either.

    ``in_flight`` returns the minibatches in flight, ``now`` the time in seconds.
    """

    in_flight: Callable[[], Iterable[Minibatch]]
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

    def finished(self, minibatch: Minibatch, args: Sequence[Any]) -> None:
        """Record when ``minibatch`` was done, which is before Lightning's thread takes it."""
        if minibatch.number == self._awaited:
            self._awaited = 0
            self._lost += minibatch.ended_at - self._resumed_at
            self._minibatches -= 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager for work of Lightning's thread other than training. A nested pause changes nothing."""
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
        """Minibatches per second of the epoch so far, or None if there are too few."""
        if self._first is None or self._minibatches < FEWEST:
            return None
        return self._minibatches / self._seconds if self._seconds > 0 else None
