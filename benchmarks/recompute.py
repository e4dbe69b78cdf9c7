"""Gain and cost of `recompute=True`: bytes of activations that stages hold, and minibatches per second."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

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
from benchmarks.training_task import WORKER, Task

NAME = "recompute"
TIMEOUT = 600.0

KEPT = "a activations kept"
AGAIN = "b forwards computed again"

Round = Mapping[str, Measurement]


def measure(task: Task) -> Measurement:
    """Measures one process."""
    return run_alone(Process(WORKER, (task.to_json(),)), TIMEOUT)


def run(options: Options) -> Outcome:
    """Measures both in `options.rounds` interleaved rounds."""
    cores = two_cores()
    machine = describe_machine(cores)
    task = Task("strategy", cores=cores, layers=16, width=512, batch=512, stages=4, in_flight=6)
    if options.quick:
        task = replace(task, warmup=8, steps=8, tail=6)
    jobs = {KEPT: partial(measure, task), AGAIN: partial(measure, replace(task, recompute=True))}
    rounds, failures = in_rounds(jobs, options.rounds)
    return report(machine, task, rounds, failures)


def report(machine: Mapping[str, object], task: Task, rounds: Sequence[Round], failures: Mapping[str, str]) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""
    rows: list[tuple[str, ...]] = [("variant", "minibatches/s", "range", "activations of each stage, MiB", "in all")]
    for variant in (KEPT, AGAIN):
        found = [measured[variant] for measured in rounds if variant in measured]
        if not found:
            rows.append((variant, "failed", "", "", ""))
            continue
        rate = Spread.of(each.rate for each in found)
        held = activations(found[-1])
        mebibytes = " ".join(f"{each / 2**20:.1f}" for each in held)
        spread = f"{rate.low:.2f} .. {rate.high:.2f}"
        rows.append((variant, f"{rate.median:.2f}", spread, mebibytes, f"{sum(held) / 2**20:.1f}"))
    both = [measured for measured in rounds if len(measured) == 2]
    rates = [one[AGAIN].rate / one[KEPT].rate for one in both]
    sizes = [sum(activations(one[AGAIN])) / sum(activations(one[KEPT])) for one in both]
    figures = [
        Figure("recompute: minibatches/s, over those with activations kept", Spread.of(rates) if both else None),
        Figure("recompute: bytes of activations, over those kept without it", Spread.of(sizes) if both else None),
    ]
    text = [
        f"{NAME}: {task.layers} x Linear({task.width}, {task.width}), batch {task.batch}, {task.stages} stages,"
        f" {task.in_flight} in flight",
        f"{provenance(machine, len(rounds))}, in each"
        f" {task.steps} minibatches after {task.warmup}; bytes counted by the engine",
        "",
        table(rows),
        "",
        figures_table(figures),
        *(f"\nfailed: {variant}\n{reason}" for variant, reason in failures.items()),
    ]
    data = {
        "machine": dict(machine),
        "task": asdict(task),
        "rounds": [{variant: asdict(value) for variant, value in measured.items()} for measured in rounds],
        "ratios": {each.name: None if each.spread is None else asdict(each.spread) for each in figures},
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)


def activations(measurement: Measurement) -> list[int]:
    """The most bytes that each stage held at once."""
    found: Any = measurement.notes["activations_bytes"]
    return list(found)
