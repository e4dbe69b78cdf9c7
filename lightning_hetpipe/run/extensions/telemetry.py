"""Telemetry of a fit: metrics on the Trainer's loggers while it runs, and the report at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L

from lightning_hetpipe.lightning_private import begun_minibatches, log_interval
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.user.batch_in_flight import BatchInFlight
from lightning_hetpipe.pipeline.user.minibatch import Minibatch
from lightning_hetpipe.placement.layout import Layout
from lightning_hetpipe.reporting.report import Meter, RunReport
from lightning_hetpipe.run.lifecycle import Extension


@dataclass(eq=False)
class Telemetry(Extension):
    """Counts the minibatches of ``engine``, and the time of its training.

    Attributes:
        trainer: Whose loggers are told.
        engine: The pipeline.
        layout: The stages that it runs.
        synchronisation: Gives the metrics of the virtual workers' synchronisation.
    """

    trainer: L.Trainer
    engine: Engine
    layout: Layout
    synchronisation: Callable[[], Mapping[str, float]] = dict
    _staleness = _logged = 0

    def __post_init__(self) -> None:
        self._meter = Meter(len(self.engine.stages))

    def start(self) -> None:
        """Training goes on from here in the pipeline: what comes before is no time of training."""
        self._meter.start()

    def epoch_begins(self, first: int) -> None:
        self._meter.start()

    def finished(self, minibatch: BatchInFlight, args: Sequence[Any]) -> None:
        assert isinstance(minibatch, Minibatch)
        self._meter.count(args[0] if args else None, minibatch.seconds)
        self._staleness = self.engine.versions.steps(minibatch.number)

    def published(self, version: int) -> None:
        self._log(version)

    @contextmanager
    def evaluating(self, minibatch: int) -> Iterator[None]:
        self._meter.stop()
        try:
            yield
        finally:
            self._meter.start()

    def epoch_ends(self) -> None:
        self._meter.stop()
        self._log(begun_minibatches(self.trainer)[0])

    def _log(self, number: int) -> None:
        """Logs the metrics after minibatch ``number``, at the Trainer's interval; not before the first counted one."""
        every = log_interval(self.trainer)
        if not every or number % every or number == self._logged or not self._meter.minibatches:
            return
        self._logged = number
        metrics = self._meter.interval([stage.stream.busy_seconds() for stage in self.engine.stages])
        for index, stage in enumerate(self.engine.stages):
            metrics[f"hetpipe/stage_{index}/memory_bytes"] = float(stage.memory.most_lately())
        metrics["hetpipe/staleness"] = float(self._staleness)
        metrics.update(self.synchronisation())
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=max(0, self.trainer.global_step - 1))  # as Lightning counts them

    def report(self) -> RunReport:
        """The numbers so far."""
        return self.layout.report(self.engine, self._meter)
