"""`python -m benchmarks.experiments`: weight policies on four small tasks, as a table and pictures.

Each run is kept in a file as it ends, so that the command goes on where it was stopped. Settings, as `name=value`:

full=true       1 to 32 minibatches in flight, three seeds, four learning rates: most of a day on two cores
tasks=[gpt]     some of the tasks
jobs=2          processes, of one thread each
folder=...      where runs, table and pictures are kept; another folder, or an empty one, begins anew
write=true      put the table and the pictures into the docs, too, and keep the runs beside the benchmarks
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from benchmarks.experiments_pictures import curves, survival
from benchmarks.experiments_runs import FULL, LONGER, UPDATES, Grid, keep, make, read, runs_of
from benchmarks.experiments_table import Comparison, table
from benchmarks.experiments_tasks import CORRECTION, TASKS
from benchmarks.harness import ROOT
from benchmarks.machine import describe_machine
from benchmarks.results import show_block

KEPT = ROOT / "benchmarks" / "experiments.jsonl"
DOCS = ROOT / "docs" / "staleness.md"
PICTURES = {"survival": "staleness-survival.svg", "curves": "staleness-curves.svg"}
BEGIN, END = "<!-- experiments: make experiments ARGS=write=true -->", "<!-- end of experiments -->"

T = TypeVar("T")


@dataclass
class Options:
    """Settings of the command."""

    full: bool = False
    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    jobs: int = 2
    folder: str = "outputs/experiments"
    write: bool = False


def settings(kind: type[T], arguments: Sequence[str]) -> T:
    """The settings that ``arguments`` give, as ``name=value``, to a dataclass with defaults.

    Raises:
        ValueError: which names the setting.
    """
    try:
        found: Any = OmegaConf.merge(OmegaConf.structured(kind), OmegaConf.from_dotlist(list(arguments)))
    except OmegaConfBaseException as error:
        raise ValueError(f"{' '.join(arguments)}: {str(error).splitlines()[0]}") from error
    return kind(**{str(name): value for name, value in found.items()})


def options(arguments: Sequence[str]) -> Options:
    """The settings that ``arguments`` give.

    Raises:
        ValueError: which names the setting.
    """
    given = settings(Options, arguments)
    if unknown := [name for name in given.tasks if name not in TASKS]:
        raise ValueError(f"tasks={unknown} are unknown; there are {', '.join(TASKS)}")
    if given.jobs < 1:
        raise ValueError(f"jobs={given.jobs} must be at least 1")
    return given


def block(comparison: Comparison, measured: str) -> str:
    """The table in Markdown, with what its cells are."""
    targets = ", ".join(f"{TASKS[name].target:g} ({TASKS[name].title})" for name in comparison.tasks)
    count = len(comparison.seeds)
    seeds = f"Means of {count} seeds" if count > 1 else "One seed"
    return "\n\n".join(
        [
            BEGIN,
            "A cell says after how many updates the validation loss is first at its target, as a multiple of those of"
            f" `sync`, and the final loss (median of the last validations). {seeds}."
            f" Targets, nats: {targets}. *K* is `lr_correction={CORRECTION}`, *clip* `gradient_clip_val=1`, *M = Nm*"
            f" `accumulate_grad_batches` of Nm; *auto* is the default; runs have {UPDATES} updates, those with"
            f" M = Nm {LONGER} times as many minibatches. *Plain* is the task's own learning rate, *tuned* that which"
            " reaches the target first, for `sync`, too.",
            table(comparison),
            measured,
            END,
        ]
    )


def measured(grid: Grid) -> str:
    """Date, grid and versions of a measurement that ends now."""
    machine = describe_machine(())
    rates, low = (", ".join(f"{rate:g}" for rate in each) for each in (grid.rates, grid.low))
    return (
        f"Measured {date.today().isoformat()}; learning rates {rates} times the plain one"
        f"{f', and {low} times for SGD with an update for each minibatch' if low else ''}."
        f" Python {machine['python']}, torch {machine['torch']}."
    )


def show(file: Path, says: str, folder: Path, docs: Path | None) -> None:
    """Writes table and pictures of the runs in ``file`` to ``folder``, and those of the docs, if given."""
    comparison = Comparison(read(file))
    pictures = {PICTURES["survival"]: survival(comparison), PICTURES["curves"]: curves(comparison)}
    show_block(block(comparison, says), pictures, folder / "experiments.md", docs, BEGIN, END)


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the runs that are missing, and shows all; returns 2 for settings that cannot be."""
    try:
        given = options(sys.argv[1:] if arguments is None else arguments)
    except ValueError as error:
        print(f"{error}\n\n{__doc__}", file=sys.stderr)
        return 2
    grid, folder = FULL if given.full else Grid(), Path(given.folder)
    file = folder / "runs.jsonl"
    there = read(file)
    missing = [run for run in runs_of(given.tasks, grid) if run not in there]
    print(f"{len(missing)} runs to make, {len(there)} are in {file}", file=sys.stderr)
    begun = time.monotonic()
    for number, (run, losses) in enumerate(make(missing, min(given.jobs, os.cpu_count() or 1)), 1):
        keep(file, run, losses)
        left = (time.monotonic() - begun) / number * (len(missing) - number)
        print(f"{number} of {len(missing)}, {left / 60:.0f} minutes to go", file=sys.stderr, end="\r", flush=True)
    says = measured(grid)
    if given.write:
        shutil.copyfile(file, KEPT)
    show(file, says, folder, DOCS if given.write else None)
    print((folder / "experiments.md").read_text())
    print(f"pictures: {', '.join(str(folder / name) for name in PICTURES.values())}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
