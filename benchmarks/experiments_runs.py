"""Runs of the experiments on weight policies: which there are, how one is made, and the file that keeps them."""

from __future__ import annotations

import math
import multiprocessing
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.experiments_tasks import TASKS, loss, validation_loss
from benchmarks.kept_lines import add_line, lines
from benchmarks.staleness_training import Recipe, batches, updates

UPDATES = 360
"""Updates of a run, of one minibatch each."""

POINTS = 30
"""Validations of a run, evenly spread."""

LONGER = 3
"""Times as many minibatches that runs get whose updates take several."""


@dataclass(frozen=True)
class Grid:
    """Numbers in flight, seeds, and factors of the plain learning rate.

    Attributes:
        in_flight: Numbers of minibatches in flight.
        seeds: Seeds of weights and batches.
        rates: Factors that every variant is tried with.
        low: Those that SGD with an update for each minibatch is tried with, too. Of the others none learned best there.
    """

    in_flight: Sequence[int] = (1, 4, 8)
    seeds: Sequence[int] = (0,)
    rates: Sequence[float] = (1.0, 0.3)
    low: Sequence[float] = (0.1,)

    def rates_of(self, recipe: Recipe) -> Sequence[float]:
        """Factors that ``recipe`` is tried with."""
        return (*self.rates, *(self.low if recipe.optimizer == "SGD" and recipe.accumulate == 1 else ()))


FULL = Grid((1, 2, 4, 8, 16, 32), (0, 1, 2), (1.0, 0.3, 0.1, 0.03), ())


@dataclass(frozen=True)
class Run:
    """A run, by what it is made from."""

    task: str
    recipe: Recipe
    in_flight: int
    seed: int

    @property
    def updates(self) -> int:
        """Number of its updates."""
        each = self.recipe.accumulate
        return UPDATES if each == 1 else LONGER * UPDATES // each

    @property
    def every(self) -> int:
        """Updates from one validation to the next."""
        return max(1, self.updates // POINTS)


Found = dict[Run, list[float]]
"""Validation losses of each run, in nats; they end early where it has diverged."""


def runs_of(tasks: Sequence[str], grid: Grid) -> list[Run]:
    """All runs of ``grid``, those first that others are compared with."""
    found = [
        Run(name, replace(recipe, lr=recipe.lr * rate), number if recipe.weights != "sync" else 1, seed)
        for seed in grid.seeds
        for number in grid.in_flight
        for name in tasks
        for recipe in (*TASKS[name].variants(number).values(), *TASKS[name].accumulating(number).values())
        for rate in grid.rates_of(recipe)
    ]
    return list(dict.fromkeys(found))


def losses_of(run: Run) -> list[float]:
    """Makes ``run``; gives the validation loss each ``run.every`` updates."""
    task = TASKS[run.task]
    train, validation = task.data()
    net, found = task.seeded(run.seed), []
    loader = batches(train, run.seed)
    epochs = math.ceil(run.updates * run.recipe.accumulate / len(loader)) + 1
    for done, _ in updates(net, lambda batch: loss(net, batch), run.recipe, run.in_flight, loader, epochs):
        if done % run.every == 0:
            found.append(round(validation_loss(net, validation), 4))
            if not math.isfinite(found[-1]):
                return found[:-1]
        if done == run.updates:
            break
    return found


def make(runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, list[float]]]:
    """Makes runs in so many processes of one thread each; yields each with its losses once it is done."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _one_thread) as pool:
        futures = {pool.submit(losses_of, run): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _one_thread() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")


def read(file: Path) -> Found:
    """The runs that ``file`` keeps."""
    found: Found = {}
    for kept in lines(file):
        losses = kept.pop("losses")
        found[Run(**{**kept, "recipe": Recipe(**kept["recipe"])})] = losses
    return found


def keep(file: Path, run: Run, losses: Sequence[float]) -> None:
    """Adds a run to ``file``."""
    add_line(file, {**asdict(run), "losses": list(losses)})
