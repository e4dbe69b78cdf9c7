"""Comparison of the jobs of a sweep: the table at its end, one row for each job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from lightning_hetpipe.planning.plan.table import aligned

_MISSING = "–"


@dataclass
class SweepJob:
    """A job of the sweep: its overrides by setting, its figures by column, and how it ended."""

    number: int
    overrides: dict[str, str]
    figures: dict[str, str] = field(default_factory=dict)
    status: str = "failed"


_jobs: list[SweepJob] = []
"""The jobs of this process's sweep so far."""


@contextmanager
def compared() -> Iterator[dict[str, str]]:
    """Note the job that runs within it, if it is one of a sweep; the dict takes its figures, by their columns."""
    hydra = HydraConfig.get()
    overrides: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)  # the job says what is wrong with one
    given = (override.lstrip("+").partition("=") for override in overrides)
    job = SweepJob(len(_jobs), {setting: value for setting, _, value in given})
    if hydra.mode == RunMode.MULTIRUN:
        _jobs.append(job)
    try:
        yield job.figures
        job.status = "done"
    except Exception as error:  # the job's reason in one sentence
        job.status = f"failed: {error}"
        raise
    except KeyboardInterrupt:
        job.status = "interrupted"
        raise


def show() -> None:
    """Print the table of the jobs, and forget them."""
    if _jobs:
        print(f"\n{table(_jobs)}", flush=True)
    _jobs.clear()


def table(jobs: list[SweepJob]) -> str:
    """A row for each job: the settings that differ among them, their figures, and how each ended."""
    settings = dict.fromkeys(name for job in jobs for name in job.overrides)
    differing = [name for name in settings if len({job.overrides.get(name) for job in jobs}) > 1]
    columns = [*dict.fromkeys(name for job in jobs for name in job.figures)]
    header = ["job", *differing, *columns, "status"]
    rows = [
        [
            str(job.number),
            *(job.overrides.get(name, _MISSING) for name in differing),
            *(job.figures.get(name, _MISSING) for name in columns),
            job.status,
        ]
        for job in jobs
    ]
    return "\n".join(aligned([header, *rows], left=(0, len(header) - 1)))
