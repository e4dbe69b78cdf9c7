"""Host cost of a minibatch: CPU time on one core over a plain Trainer's, by turns in one process, and where it goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.harness import Options, Outcome, Process, in_rounds, run_alone, table
from benchmarks.training_task import WORKER, Task
from benchmarks.turns import TIMEOUT, Pair, Turns, shortened

PLAIN = Task(
    "plain", model="gpt", layers=8, width=16, batch=1, optimizer="adamw", warmup=30, steps=120, tail=5, turns=8
)
"""A GPT whose kernels are short, so that Python is what a minibatch costs."""


def pair(label: str, target: float, stages: int, in_flight: int, weights: str | None = None) -> Pair:
    """A plain run, and a run with so many ``stages`` and minibatches in flight."""
    on = replace(PLAIN, variant="strategy", stages=stages, in_flight=in_flight, weights=weights)
    return Pair(label, PLAIN, on, target)


EVALUATION = Pair(
    "f evaluation, two stages, Nm = 3",
    replace(PLAIN, loop="test"),
    replace(PLAIN, variant="strategy", loop="test", stages=2, in_flight=3),
    1.2,
)

NAME = "host_cost"
PAIRS = Turns(
    NAME,
    "a GPT of 8 blocks of width 16 against a plain Trainer, on one core",
    [
        pair("a one stage, Nm = 1", 1.05, 1, 1),
        pair("b two stages on one device, Nm = 1", 1.05, 2, 1),
        pair("c two stages, Nm = 3, stash", 1.35, 2, 3, "stash"),
        pair("d two stages, Nm = 3, predicted", 1.45, 2, 3),
        pair("e four stages, Nm = 5, predicted", 1.6, 4, 5),
        EVALUATION,
    ],
    "CPU time per minibatch over a plain Trainer's",
    1.05,
    of_cpu=True,
    cores=1,
)


def run(options: Options) -> Outcome:
    """Measures all pairs, and profiles the plain run and the runs with several minibatches in flight once."""
    outcome = PAIRS.run(options)
    pairs = [shortened(pair) if options.quick else pair for pair in PAIRS.pairs]
    tasks = {"plain": pairs[0].off} | {pair.label: pair.on for pair in pairs if (pair.on.in_flight or 1) > 1}
    once = {label: replace(task, turns=1, cores=PAIRS.cpus(), profile=True) for label, task in tasks.items()}
    (found,), failures = in_rounds({label: partial(profile, task) for label, task in once.items()}, 1)
    text = [
        outcome.text,
        "\ncalls of Python functions and microseconds of CPU time per minibatch by folder, under a tracer that makes"
        "\neach call dearer: compare columns, not times",
        "",
        table(by_folder(found)),
        *(f"\nfailed: {label}\n{reason}" for label, reason in failures.items()),
    ]
    data = {**outcome.data, "profiles": dict(found)}
    return replace(outcome, text="\n".join(text), data=data, complete=outcome.complete and not failures)


Profile = Mapping[str, tuple[float, float]]
"""Calls and microseconds of CPU time per minibatch, by folder."""


def profile(task: Task) -> Profile:
    """Runs ``task`` under a tracer, in a fresh process."""
    found = run_alone(Process(WORKER, (task.to_json(),)), TIMEOUT).notes["folders"]
    assert isinstance(found, Mapping)
    return {folder: (float(calls), float(spent)) for folder, (calls, spent) in found.items()}


def by_folder(profiles: Mapping[str, Profile]) -> Sequence[tuple[str, ...]]:
    """Rows of a table with a column for each variant, the dearest folder first."""
    totals = defaultdict[str, float](float)
    for found in profiles.values():
        for folder, (_, spent) in found.items():
            totals[folder] += spent
    rows: list[tuple[str, ...]] = [("folder", *profiles)]
    for folder in sorted(totals, key=totals.__getitem__, reverse=True):
        cells = [found.get(folder, (0.0, 0.0)) for found in profiles.values()]
        if max(spent for _, spent in cells) >= 1:
            rows.append((folder, *(f"{calls:.0f}, {spent:.0f}" for calls, spent in cells)))
    return rows
