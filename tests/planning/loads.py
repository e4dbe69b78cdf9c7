"""Simulated runs: with any waves and jitter, their rate, the loads of their stages, and how busy these are."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetpipe.planning.model.simulate import (
    PipelineRun,
    Simulation,
    StageLoad,
    StageTimes,
    TaskFields,
    WorkerPipeline,
)
from lightning_hetpipe.rules.versions import STASH, Versions


def varied(
    stages: Sequence[StageTimes],
    in_flight: int,
    minibatches: int,
    *,
    wave: int | None = None,
    step: float = 0.0,
    synchronise: float = 0.0,
    jitter: float = 0.0,
    seed: int = 0,
) -> Simulation:
    """A run as of ``simulate``, with waves of another length than Nm, or with jitter."""
    given, tasks = WorkerPipeline(stages, wave or in_flight, step), list[TaskFields]()
    versions = Versions(STASH, in_flight)
    run = PipelineRun(given, versions, minibatches, jitter, (seed, 0), synchronise=synchronise, tasks=tasks)
    run.advance()
    return Simulation(tasks, tuple(run.published), tuple(run.held))


def rate(run: Simulation, edge: int = 0) -> float:
    """Minibatches per second without the first and the last ``edge``, when the pipeline fills and drains."""
    last = len(run.published) - edge
    return (last - edge) / (run.published[last - 1] - (run.published[edge - 1] if edge else 0.0))


def loads(run: Simulation, stage: int) -> list[tuple[float, StageLoad]]:
    """Each change of what ``stage`` holds, with its time. Changes at one time come one by one."""
    when, *counts = (each.tolist() for each in run._changes(stage))
    return [*zip(when, map(StageLoad, *counts), strict=True)]


def busy(run: Simulation, stage: int) -> float:
    """The fraction of the run in which ``stage`` computed."""
    return sum(span.end - span.start for span in run.spans if span.stage == stage) / run.published[-1]
