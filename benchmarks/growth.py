"""Memory, threads and descriptors of every process in a long run of several virtual workers: none grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from benchmarks.growth_worker import WORKER, Task
from benchmarks.harness import (
    Figure,
    Measurement,
    Options,
    Outcome,
    Process,
    Spread,
    figures_table,
    in_rounds,
    run_alone,
    table,
)
from benchmarks.machine import describe_machine, provenance, two_cores
from tests.support.process_use import Use

NAME = "growth"
TIMEOUT = 1800.0
LONG = Task(steps=20_000, epochs=20)
SHORT = Task(steps=400, epochs=4, samples=100)

MEMORY = 8.0
"""MiB by which the memory of a process may grow: allocators keep some of what they have once had."""


@dataclass(frozen=True)
class Growth:
    """One process in the first and in the last quarter of a run, as medians: what it has for a moment is no growth."""

    first: Use
    last: Use

    @property
    def memory(self) -> float:
        """MiB more in the last quarter."""
        return (self.last.memory - self.first.memory) / (1 << 20)

    @property
    def descriptors(self) -> int:
        """Descriptors more in the last quarter."""
        return self.last.descriptors - self.first.descriptors

    @property
    def threads(self) -> int:
        """Threads more in the last quarter."""
        return self.last.threads - self.first.threads

    @property
    def grows(self) -> list[str]:
        """Names of all that grows."""
        more = {"memory": self.memory > MEMORY, "descriptors": self.descriptors > 0, "threads": self.threads > 0}
        return [name for name, is_more in more.items() if is_more]


def growth(seen: Sequence[Use]) -> Growth:
    """Compare quarters of what was seen of a process, which were four times at least."""
    quarter = len(seen) // 4
    return Growth(_typical(seen[:quarter]), _typical(seen[-quarter:]))


def _typical(seen: Sequence[Use]) -> Use:
    return Use(*(round(median(column)) for column in zip(*seen, strict=True)))


def measure(task: Task) -> dict[str, Growth]:
    """Train, and compare the quarters, by the names of processes."""
    return judged(run_alone(Process(WORKER, (task.to_json(),)), TIMEOUT))


def judged(announced: Measurement) -> dict[str, Growth]:
    """Growth of each process of which a run has announced what it took."""
    seen: Any = announced.notes["seen"]
    return {name: growth([Use(*each) for each in uses]) for name, uses in seen.items()}


def run(options: Options) -> Outcome:
    """Train `options.rounds` times."""
    cores = two_cores()
    task = replace(SHORT if options.quick else LONG, cores=cores)
    machine = describe_machine(cores)
    rounds, failures = in_rounds({NAME: partial(measure, task)}, options.rounds)
    return report(machine, task, [each[NAME] for each in rounds if NAME in each], failures)


def report(
    machine: Mapping[str, object], task: Task, rounds: Sequence[Mapping[str, Growth]], failures: Mapping[str, str]
) -> Outcome:
    """Turn what was found into a text to read and data to keep; of rounds, those who grow most count."""
    most: dict[str, tuple[list[float], float, int]] = {
        "MiB more": ([max(each.memory for each in found.values()) for found in rounds], MEMORY, 1),
        "descriptors more": ([max(each.descriptors for each in found.values()) for found in rounds], 0.0, 0),
        "threads more": ([max(each.threads for each in found.values()) for found in rounds], 0.0, 0),
    }
    figures = [
        Figure(
            f"{name} in the last quarter than in the first one, the most of any process",
            Spread.of(values) if values else None,
            unit=name.split()[0],
            target=bound,
            at_most=True,
            digits=digits,
        )
        for name, (values, bound, digits) in most.items()
    ]
    text = [
        f"{NAME}: {task.workers} virtual workers, {task.steps:,} steps each, {task.epochs} epochs, each with validation"
        " and checkpoint; first -> last quarter",
        provenance(machine, len(rounds)),
        "",
        table([("process", "MiB", "descriptors", "threads", ""), *(_row(*each) for each in _worst(rounds).items())]),
        "",
        figures_table(figures, "figure"),
        *(f"\nfailed: {name}\n{reason}" for name, reason in failures.items()),
    ]
    data = {
        "machine": dict(machine),
        "task": asdict(task),
        "rounds": [{name: asdict(each) for name, each in found.items()} for found in rounds],
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)


def _worst(rounds: Sequence[Mapping[str, Growth]]) -> dict[str, Growth]:
    """For each process, the round in which its memory grew most."""
    found: dict[str, Growth] = {}
    for name, each in (pair for growths in rounds for pair in growths.items()):
        found[name] = max(found.get(name, each), each, key=lambda growth: growth.memory)
    return found


def _row(name: str, found: Growth) -> tuple[str, ...]:
    memory = f"{found.first.memory / (1 << 20):.1f} -> {found.last.memory / (1 << 20):.1f}"
    descriptors = f"{found.first.descriptors} -> {found.last.descriptors}"
    threads = f"{found.first.threads} -> {found.last.threads}"
    return name, memory, descriptors, threads, f"grows: {', '.join(found.grows)}" if found.grows else ""
