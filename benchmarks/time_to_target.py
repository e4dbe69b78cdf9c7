"""Time to a validation loss on two cores: weight policies against the plain Trainer and Schedule1F1B.

`python -m benchmarks.time_to_target` searches for the learning rates of `RATES` instead: it prints, for each of them,
after how many updates each variant reaches the loss.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import median

from benchmarks import results
from benchmarks.harness import (
    ROOT,
    Figure,
    Measurement,
    Options,
    Outcome,
    Process,
    ProcessFailed,
    Spread,
    figures_table,
    in_rounds,
    run_alone,
    run_together,
    table,
)
from benchmarks.machine import describe_machine, provenance, two_cores
from benchmarks.time_to_target_worker import Job

NAME = "time_to_target"
DOCS = ROOT / "docs" / "staleness.md"
BEGIN, END = "<!-- time to target: python -m benchmarks --readme -->", "<!-- end of time to target -->"
WORKER = "benchmarks.time_to_target_worker"
TIMEOUT = 500.0
TARGET = 2.2
"""Validation loss, nats per byte."""
QUICK_TARGET, QUICK_UPDATES = 3.2, 200
TRIED_UPDATES = 100
RATES = (0.0005, 0.001, 0.002, 0.004)
PARTS = (2, 4, 8)
"""Numbers of microbatches to choose from, for those whose updates they do not change."""

SYNCHRONOUS = Job("plain", lr=0.002, updates=640)
"""Variants that equal plain training take the same updates, at the rate that is best for it."""

PLAIN, PLAIN_TWO = "a plain Trainer, one thread", "b plain Trainer, two threads"
SCHEDULE_1F1B = "c Schedule1F1B, two gloo processes"
SYNC, STASH, AUTO = "d sync", "e stash", "f auto"
AUTO_ACCUMULATING, AUTO_TWO = "g auto, 2 minibatches to an update", "h auto, 2 in flight"

VARIANTS: Mapping[str, Job] = {
    PLAIN: SYNCHRONOUS,
    PLAIN_TWO: replace(SYNCHRONOUS, threads=2),
    SCHEDULE_1F1B: replace(SYNCHRONOUS, variant="schedule_1f1b", parts=4),
    SYNC: replace(SYNCHRONOUS, variant="strategy", weights="sync", parts=4),
    STASH: Job("strategy", lr=0.0005, updates=2200, weights="stash"),
    AUTO: Job("strategy", lr=0.0005, updates=1240, weights="auto"),
    AUTO_ACCUMULATING: Job("strategy", lr=0.001, updates=700, weights="auto", parts=2),
    AUTO_TWO: Job("strategy", lr=0.001, updates=700, weights="auto", in_flight=2),
}

COMPARED = (
    *((variant, PLAIN) for variant in VARIANTS if variant != PLAIN),
    *((variant, SCHEDULE_1F1B) for variant in (SYNC, AUTO, AUTO_ACCUMULATING, AUTO_TWO)),
)
"""Pairs of variants: the time of the second one over that of the first one."""

Round = Mapping[str, Measurement]
"""For each variant that ran in the round, its measurement."""


@dataclass(frozen=True)
class Reached:
    """When a run was at the target: interpolated between two validations."""

    seconds: float
    updates: float


def reached(run: Measurement, target: float, every: int) -> Reached | None:
    """The first time that a run's validation loss was at ``target``; None if it never was."""
    seconds, losses = run.numbers("seconds"), run.numbers("losses")
    if losses[0] <= target:
        return Reached(seconds[0], every)
    for index, (before, after) in enumerate(pairwise(losses)):
        if after <= target:
            share = (before - target) / (before - after)
            passed = seconds[index] + share * (seconds[index + 1] - seconds[index])
            return Reached(passed, every * (index + 1 + share))
    return None


def measure(job: Job, seeds: Iterator[int]) -> Measurement:
    """Measures a variant with the next seed."""
    job = replace(job, seed=next(seeds))
    if job.variant != "schedule_1f1b":
        return run_alone(Process(WORKER, (job.to_json(),), job.threads), TIMEOUT)
    with tempfile.TemporaryDirectory() as folder:
        job = replace(job, rendezvous=str(Path(folder, "rendezvous")))
        ranks = [Process(WORKER, (replace(job, rank=rank).to_json(),), job.threads) for rank in (0, 1)]
        (first,), (last,) = run_together(ranks, TIMEOUT)
    # An update is done once it is on both stages.
    seconds = [max(pair) for pair in zip(first.numbers("seconds"), last.numbers("seconds"), strict=True)]
    return replace(
        last,
        rate=min(first.rate, last.rate),
        cores=first.cores + last.cores,
        notes={**last.notes, "seconds": seconds},
    )


def fastest(job: Job) -> Job:
    """The job with that number of microbatches of which a short run makes the most updates per second."""
    print(f"searching for the best number of microbatches: {job.variant}", file=sys.stderr, flush=True)
    jobs = [replace(job, parts=parts) for parts in PARTS]
    try:
        return max(jobs, key=lambda each: measure(replace(each, updates=TRIED_UPDATES), count(1)).rate)
    except ProcessFailed:
        return job  # The rounds will meet the same failure, and report it.


def run(options: Options) -> Outcome:
    """Measures all variants in `options.rounds` interleaved rounds, each with a seed of its own."""
    cores = two_cores()
    machine = describe_machine(cores)
    jobs = {name: replace(job, cores=cores) for name, job in VARIANTS.items()}
    if options.quick:
        jobs = {name: replace(job, updates=QUICK_UPDATES) for name, job in jobs.items()}
    else:
        jobs |= {name: fastest(jobs[name]) for name in (SCHEDULE_1F1B, SYNC)}
    measures: dict[str, Callable[[], Measurement]] = {
        name: partial(measure, job, count(1)) for name, job in jobs.items()
    }
    rounds, failures = in_rounds(measures, options.rounds)
    return report(machine, jobs, rounds, failures, QUICK_TARGET if options.quick else TARGET)


def compare(rounds: Sequence[Mapping[str, float | None]], over: str, under: str) -> Spread | None:
    """Summarises ``over``'s value over ``under``'s, formed within each round; None where a round lacks one."""
    pairs = [(values.get(over), values.get(under)) for values in rounds]
    ratios = [first / second for first, second in pairs if first is not None and second is not None]
    return Spread.of(ratios) if ratios and len(ratios) == len(pairs) else None


def time_of(name: str, under: str) -> str:
    """Name of a ratio: by how much a variant is sooner at the target than another one."""
    return f"time to target: that of {under[2:]}, over that of {name[2:]}"


def updates_of(name: str) -> str:
    """Name of a ratio: updates until the target, over those of plain training."""
    return f"updates to target over plain's, {name[2:]}"


def speed_of(name: str) -> str:
    """Name of a ratio: updates per second, over those of plain training."""
    return f"updates per second over plain's, {name[2:]}"


def report(
    machine: Mapping[str, object],
    jobs: Mapping[str, Job],
    rounds: Sequence[Round],
    failures: Mapping[str, str],
    target: float,
) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""
    points = [{name: reached(each, target, jobs[name].every) for name, each in measured.items()} for measured in rounds]
    seconds = [{name: point.seconds if point else None for name, point in found.items()} for found in points]
    updates = [{name: point.updates if point else None for name, point in found.items()} for found in points]
    speeds: list[dict[str, float | None]] = [
        {name: each.rate for name, each in measured.items()} for measured in rounds
    ]
    figures = [Figure(time_of(name, under), compare(seconds, under, name)) for name, under in COMPARED]
    others = [name for name in jobs if name != PLAIN]
    figures += [Figure(updates_of(name), compare(updates, name, PLAIN)) for name in others]
    figures += [Figure(speed_of(name), compare(speeds, name, PLAIN)) for name in others]
    job = jobs[PLAIN]
    text = [
        f"{NAME}: seconds to a validation loss of {target} nats per byte; the demo's GPT, {job.blocks} blocks of width"
        f" {job.width}, {job.length} bytes, AdamW, an update for each {job.texts} texts",
        provenance(machine, len(rounds)),
        "",
        table([_HEADER, *(_row(name, each, rounds, points) for name, each in jobs.items())]),
        "",
        figures_table(figures),
        *(f"\nfailed: {variant}\n{reason}" for variant, reason in failures.items()),
    ]
    data = {
        "machine": dict(machine),
        "target": target,
        "jobs": {name: asdict(each) for name, each in jobs.items()},
        "rounds": [{name: asdict(each) for name, each in measured.items()} for measured in rounds],
        "ratios": {figure.name: None if figure.spread is None else asdict(figure.spread) for figure in figures},
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)


_HEADER = ("variant", "lr", "seconds", "range", "updates", "updates/s", "cores busy", "start s", "last loss", "")


def _row(
    name: str, job: Job, rounds: Sequence[Round], points: Sequence[Mapping[str, Reached | None]]
) -> tuple[str, ...]:
    runs = [measured[name] for measured in rounds if name in measured]
    if not runs:
        return (name, f"{job.lr:g}", "failed", *[""] * (len(_HEADER) - 3))
    found = [point for each in points if (point := each.get(name)) is not None]
    times = Spread.of(point.seconds for point in found) if found else None
    notes = [f"in flight {runs[-1].notes['in_flight']}"] if "in_flight" in runs[-1].notes else []
    notes += [f"{job.parts} to an update"] if job.parts > 1 else []
    notes += [f"{len(runs) - len(found)} of {len(runs)} never"] if len(found) < len(runs) else []
    return (
        name,
        f"{job.lr:g}",
        "never" if times is None else f"{times.median:.1f}",
        "" if times is None else f"{times.low:.1f} .. {times.high:.1f}",
        f"{median(point.updates for point in found):.0f}" if found else "",
        f"{median(each.rate for each in runs):.1f}",
        f"{median(each.cores for each in runs):.2f}",
        f"{median(float(str(each.notes['start_s'])) for each in runs):.1f}",
        f"{runs[-1].loss:.3f}",
        ", ".join(notes),
    )


def block(kept: results.Results) -> str:
    """The table of the docs: the ratios that were measured, and where they were."""
    measured = {name: section for name, section in kept.items() if name == NAME}
    figures = {figure.name: figure for section in measured.values() for figure in results.figures_of(section)}
    header = ("over one thread", "learning rate", "updates to the target", "updates per second", "sooner at the target")
    rows: list[tuple[str, ...]] = [header]
    for name, job in VARIANTS.items():
        if name != PLAIN:
            ratios = (figures.get(each) for each in (updates_of(name), speed_of(name), time_of(name, PLAIN)))
            rows.append((name[2:], f"{job.lr:g}", *map(_cell, ratios)))
    lines = [*results.as_table(rows), "", *(f"- {line}" for line in results.measured(measured))]
    return "\n".join([BEGIN, "", *lines, "", END])


def _cell(figure: Figure | None) -> str:
    if figure is None or figure.spread is None:
        return "–"
    middle, reach, _, _ = figure.cells()
    return f"{middle} ({reach})"


def cite(kept: results.Results) -> None:
    """Replace the table in the docs."""
    results.replace_block(DOCS, block(kept), BEGIN, END)


def main() -> None:
    """Prints after how many updates each variant that has a rate of its own reaches the target, by rate."""
    rows: list[tuple[str, ...]] = [("updates to target", *(f"{lr:g}" for lr in RATES))]
    for name in (PLAIN, STASH, AUTO, AUTO_ACCUMULATING, AUTO_TWO):
        cells = []
        for lr in RATES:
            job = replace(VARIANTS[name], lr=lr, cores=two_cores())
            print(f"{name}, {lr:g}", file=sys.stderr, flush=True)
            point = reached(measure(job, count(1)), TARGET, job.every)
            cells.append("never" if point is None else f"{point.updates:.0f}")
        rows.append((name, *cells))
    print(table(rows))


if __name__ == "__main__":
    main()
