"""Loads of the stages of a simulated run, and how busy they are."""

from __future__ import annotations

from lightning_hetpipe.planning.model.simulate import Simulation, StageLoad


def loads(run: Simulation, stage: int) -> list[tuple[float, StageLoad]]:
    """Each change of what ``stage`` holds, with its time. Changes at one time come one by one."""
    when, *counts = (each.tolist() for each in run._changes(stage))
    return [*zip(when, map(StageLoad, *counts), strict=True)]


def busy(run: Simulation, stage: int) -> float:
    """The fraction of the run in which ``stage`` computed."""
    return sum(span.end - span.start for span in run.spans if span.stage == stage) / run.published[-1]
