"""Telemetry of a fit: its metrics and report, its pace, sections for Lightning's profilers, and the timeline.

Metrics go to the Trainer's loggers while the fit runs, and the report comes at its end. The pace is the minibatches per
second that a virtual worker would make if it never waited for other virtual workers. Sections of Lightning's thread are
its work for the pipeline, by name. The timeline is recorded while the fit runs, then written into the run's folder and
shown on TensorBoard.
"""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.profilers import PassThroughProfiler, Profiler, PyTorchProfiler
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.profiler import record_function

from lightning_hetpipe.lightning_private import begun_minibatches
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.recorder import Recorder, Window
from lightning_hetpipe.pipeline.stage import BeforePass
from lightning_hetpipe.pipeline.user.minibatch import Minibatch
from lightning_hetpipe.placement.layout import Layout
from lightning_hetpipe.reporting.report import Meter, RunReport
from lightning_hetpipe.reporting.timeline import Timeline
from lightning_hetpipe.rules.schedule import FORWARD
from lightning_hetpipe.run.lifecycle import NOTHING, Around, Extension


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
    only the time in which nothing moved, and the time in which the pipeline fills again. It is full at the end of the
    first minibatch that was not in flight. That minibatch is not counted either.

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


# Sections and timeline.

PREFIX = "[HetPipe]"
"""Prefix of our names, like Lightning's "[Strategy]" and "[Callback]"."""

LIGHTNINGS = ("fetch", "evaluation")
"""Sections that Lightning itself reports to profilers under its own names."""


@dataclass(eq=False)
class ProfiledSections(Extension):
    """Sections for ``profiler``. Profilers are not made for several threads: SimpleProfiler and AdvancedProfiler keep
    one start for each name, and AdvancedProfiler ends a running section. So they are told only of Lightning's thread,
    one section at a time. PyTorchProfiler, whose ranges belong to threads, shows the stages' computations."""

    profiler: Profiler

    def doing(self, name: str, minibatch: int) -> Around:
        return NOTHING if name in LIGHTNINGS else self._told(PREFIX + name)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        self.profiler.start(name)
        try:
            yield
        finally:
            self.profiler.stop(name)


def profiled_sections(trainer: L.Trainer) -> list[Extension]:
    """Return the extension that reports sections to ``trainer``'s profiler, if it has one."""
    profiler = _profiler(trainer)
    return [] if profiler is None or isinstance(profiler, PassThroughProfiler) else [ProfiledSections(profiler)]


def _profiler(trainer: L.Trainer) -> Profiler | None:
    profiler: Profiler | None = getattr(trainer, "profiler", None)  # set by a connector, without declaring it
    return profiler


def shown_to_profiler(before: BeforePass | None, trainer: L.Trainer) -> BeforePass | None:
    """Add to ``before`` the names of passes for PyTorchProfiler, if the Trainer uses it."""
    if not isinstance(_profiler(trainer), PyTorchProfiler):
        return before

    def passes(stage: int, work: str, minibatch: int) -> Callable[[], None]:
        shown: Any = record_function(f"{PREFIX}stage {stage} {work}", str(minibatch))
        shown.__enter__()
        after = None if before is None else before(stage, work, minibatch)

        def passed() -> None:
            if after is not None:
                after()
            shown.__exit__(None, None, None)

        return passed

    return passes


class Recording(Recorder, Extension):
    """A recording of the timeline of virtual worker i: Lightning's thread, user code and stages. All virtual workers
    make their recordings at the same time, because they agree on the folder. ``window`` are the minibatches to keep."""

    def __init__(self, trainer: L.Trainer, window: Window, virtual_worker: int) -> None:
        super().__init__(window)
        self._trainer = trainer
        self._virtual_worker = virtual_worker
        self._shown: range | None = None
        self._folder = str(trainer.log_dir or trainer.default_root_dir)

    @contextmanager
    def doing(self, name: str, minibatch: int) -> Iterator[None]:
        self.enter(name, minibatch)
        begins_step = False  # True after a wait for a minibatch
        try:
            yield
            begins_step = name == "wait_for_minibatch"
        finally:
            self.leave(begins_step)

    def computed(self, work: str, minibatch: int, start: float) -> None:
        """Record Lightning's own forward or backward of ``minibatch`` since ``start``."""
        if work == FORWARD:
            self.submitted(minibatch, minibatch - 1)
        self.add(0, work, minibatch, start)

    def discarded(self) -> None:
        self.forget(after=begun_minibatches(self._trainer)[0])

    def timeline(self, devices: Sequence[str], in_flight: int) -> Timeline:
        """Return the timeline so far, of stages on ``devices``."""
        self.pause()
        return Timeline(
            self.spans(),
            len(devices),
            in_flight,
            self._virtual_worker,
            versions=self.versions(),
            zero=self.zero_date,
            devices=tuple(devices),
        )

    def show(self, timeline: Timeline) -> None:
        """Write ``timeline`` into the run's folder and to TensorBoard, unless that was done. A failure causes only a
        warning: it must neither end the training nor hide an error that did."""
        if timeline.minibatches == self._shown or getattr(self._trainer, "fast_dev_run", False):
            return
        self._shown = kept = timeline.minibatches
        if not kept:
            self._warn_of_none()
            return
        try:
            path = self._write(timeline)
            rank_zero_info(
                f"The timeline of minibatches {kept.start} to {kept.stop - 1} is in {path}; https://ui.perfetto.dev"
                " opens it."
            )
        except Exception as error:
            warnings.warn(f"the timeline could not be written into {self._folder}: {error}", stacklevel=2)
        try:
            self._log(timeline)
        except Exception as error:
            warnings.warn(f"TensorBoard does not show the timeline: {error}", stacklevel=2)

    def _warn_of_none(self) -> None:
        window = self.window
        asked = "True" if window.last is None else f"({window.first}, {window.last})"
        rank_zero_warn(
            f"timeline={asked} recorded nothing: the run ended after minibatch {begun_minibatches(self._trainer)[0]},"
            " and the first one of a fit, before there are stages, is in no timeline; ask for minibatches that the run"
            " has, or train for longer"
        )

    def _log(self, timeline: Timeline) -> None:
        loggers = [logger for logger in self._trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if not loggers or not self._trainer.is_global_zero:
            return
        from lightning_hetpipe.reporting.plots import draw  # and matplotlib, which other runs do without

        figure = draw(timeline)
        for logger in loggers:
            logger.experiment.add_figure("hetpipe/timeline", figure, global_step=self._trainer.global_step)

    def _write(self, timeline: Timeline) -> str:
        """Write the timeline under a name unlike the names of other virtual workers and earlier runs."""
        files = get_filesystem(self._folder)
        files.makedirs(self._folder, exist_ok=True)
        worker = f"-vw{self._virtual_worker}" if self._trainer.world_size > 1 else ""
        kept = timeline.minibatches
        name = f"{self._folder.rstrip('/')}/timeline{worker}-{kept.start}-{kept.stop - 1}"
        path = next(path for path in _paths(name) if not files.exists(path))
        with files.open(path, "w") as file:
            json.dump(timeline.to_chrome_trace(), file)
        return path


def _paths(name: str) -> Iterator[str]:
    """Yield file names with versions as ModelCheckpoint makes them."""
    yield f"{name}.json"
    yield from (f"{name}-v{version}.json" for version in itertools.count(1))
