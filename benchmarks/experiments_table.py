"""Comparison of weight policies from the experiments' runs, as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from benchmarks.experiments_runs import Found, Run
from benchmarks.experiments_tasks import TASKS, Task
from benchmarks.results import as_table
from benchmarks.staleness_training import Recipe

LAST = 5
"""Validations whose median is the final loss."""


@dataclass(frozen=True)
class Result:
    """Means over seeds, at one learning rate.

    Attributes:
        updates: Until the task's target; infinite if a seed does not reach it.
        loss: Final validation loss; infinite if a seed has diverged.
        rate: Factor of the plain learning rate.
    """

    updates: float
    loss: float
    rate: float


def updates_to(run: Run, losses: Sequence[float], target: float) -> float:
    """Updates of ``run`` until its validation loss is no more than ``target``; infinite if it never is."""
    reached = (index + 1 for index, each in enumerate(losses) if each <= target)
    return next(reached, math.inf) * run.every


def final_loss(run: Run, losses: Sequence[float]) -> float:
    """Validation loss at the end of ``run``; infinite if it has diverged."""
    return median(losses[-LAST:]) if len(losses) == run.updates // run.every else math.inf


class Comparison:
    """Results of ``found``, by task, recipe at the plain learning rate, and number in flight."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self.in_flight = sorted({run.in_flight for run in found})
        self.seeds = sorted({run.seed for run in found})
        self.tasks = [name for name in TASKS if any(run.task == name for run in found)]

    def results(self, name: str, recipe: Recipe, in_flight: int) -> list[Result]:
        """One result for each learning rate that every seed was tried with, the largest first."""
        task, number = TASKS[name], 1 if recipe.weights == "sync" else in_flight
        by_rate: dict[float, list[Run]] = {}
        for run in self._found:
            if (run.task, run.in_flight, replace(run.recipe, lr=recipe.lr)) == (name, number, recipe):
                by_rate.setdefault(run.recipe.lr, []).append(run)
        return [
            Result(
                mean(updates_to(run, self._found[run], task.target) for run in runs),
                mean(final_loss(run, self._found[run]) for run in runs),
                lr / recipe.lr,
            )
            for lr, runs in sorted(by_rate.items(), reverse=True)
        ]

    def plain(self, name: str, recipe: Recipe, in_flight: int) -> Result | None:
        """The result at the plain learning rate."""
        found = self.results(name, recipe, in_flight)
        return next((each for each in found if math.isclose(each.rate, 1.0)), None)

    def tuned(self, name: str, recipe: Recipe, in_flight: int) -> Result | None:
        """The result at the learning rate that reaches the target first; if none does, with the lowest final loss."""
        found = self.results(name, recipe, in_flight)
        return min(found, key=lambda each: (each.updates, each.loss), default=None)

    def losses(self, name: str, recipe: Recipe, in_flight: int) -> tuple[Run, list[float]] | None:
        """A run of the first seed, and its losses."""
        run = Run(name, recipe, in_flight if recipe.weights != "sync" else 1, self.seeds[0])
        return (run, self._found[run]) if run in self._found else None


def relative(result: Result | None, sync: Result | None) -> float:
    """Updates until the target, as a multiple of those of ``sync``; infinite if it is not reached."""
    return result.updates / sync.updates if result and sync and math.isfinite(sync.updates) else math.inf


def table(comparison: Comparison) -> str:
    """All results in Markdown: updates relative to ``sync``, and the final loss."""
    numbers = [number for number in comparison.in_flight if number > 1]
    header = ["", *(f"Nm = {number}, {rate}" for number in numbers for rate in ("plain", "tuned"))]
    rows = [header]
    for name in comparison.tasks:
        task = TASKS[name]
        rows.append([f"**{task.title}**", *("" for _ in header[1:])])
        for label, recipes in _rows(task, numbers).items():
            cells = []
            for number in numbers:
                recipe = recipes[number]
                sync = task.sync(recipe)
                for of in (comparison.plain, comparison.tuned):
                    cells.append(_cell(of(name, recipe, number), of(name, sync, number)))
            rows.append([label, *cells])
    return "\n".join(as_table(rows))


def _rows(task: Task, numbers: Sequence[int]) -> Mapping[str, Mapping[int, Recipe]]:
    found: dict[str, dict[int, Recipe]] = {}
    for number in numbers:
        plain = {"sync": task.sync(task.recipe), **task.variants(number)}
        accumulating = {f"{label}, M = Nm": each for label, each in task.accumulating(number).items()}
        for label, recipe in {**plain, **accumulating}.items():
            found.setdefault(label, {})[number] = recipe
    return found


def _cell(result: Result | None, sync: Result | None) -> str:
    if result is None:
        return ""
    ratio = relative(result, sync)
    many = f"{ratio:.1f} x" if math.isfinite(ratio) else "never"
    return f"{many}, {result.loss:.2g}" if math.isfinite(result.loss) else f"{many}, diverged"
