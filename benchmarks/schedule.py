"""Throughput of four unequal, emulated stages under a Trainer, over 1/T_max and over the schedule's own bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

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
from lightning_hetpipe.planning.model.simulate import StageTimes, simulate

NAME = "schedule"
TIMEOUT = 300.0
TARGET = 0.98
TARGET_MS = 20
SLOWEST_MS = (TARGET_MS, 10, 5, 3, 2)
QUICK_MS = (TARGET_MS, 5)

SHAPES: Mapping[str, tuple[float, ...]] = {
    "first": (1.0, 0.8, 0.6, 0.5),
    "in the middle": (0.6, 1.0, 0.8, 0.5),
    "last": (0.5, 0.6, 0.8, 1.0),
}
"""For each place of the bottleneck, the stages' times over T_max."""

# So little to compute that what is measured is the schedule, and what Lightning and the engine add to it.
TASK = Task(
    "strategy", layers=4, width=128, batch=4, momentum=0.0, warmup=60, steps=180, tail=12, stages=4, in_flight=6
)

Rounds = Sequence[Mapping[str, Measurement]]


def task(bottleneck: str, milliseconds: float) -> Task:
    """Stages whose longest takes ``milliseconds``, a third of it forward."""
    times = [share * milliseconds / 1000 for share in SHAPES[bottleneck]]
    return replace(TASK, pads=tuple((seconds / 3, seconds * 2 / 3) for seconds in times))


def variant(bottleneck: str, milliseconds: float) -> str:
    return f"bottleneck {bottleneck}, T_max = {milliseconds:g} ms"


def measure(task: Task) -> Measurement:
    """Trains in a fresh process with one torch thread."""
    return run_alone(Process(WORKER, (task.to_json(),)), TIMEOUT)


def ideal(task: Task) -> float:
    """The fraction of 1/T_max at which the schedule runs if nothing but the stages takes time."""
    stages = [StageTimes(forward, backward) for forward, backward in task.pads]
    assert task.in_flight is not None
    published = simulate(stages, task.in_flight, task.total).published
    last = task.total - task.warmup
    return (last - task.warmup) / (published[last - 1] - published[task.warmup - 1]) * longest(task)


def longest(task: Task) -> float:
    """T_max in seconds."""
    return max(sum(pad) for pad in task.pads)


def run(options: Options) -> Outcome:
    """Measures all variants in `options.rounds` interleaved rounds."""
    cores = two_cores()
    machine = describe_machine(cores)
    sizes = QUICK_MS if options.quick else SLOWEST_MS
    tasks = {variant(where, ms): replace(task(where, ms), cores=cores) for ms in sizes for where in SHAPES}
    rounds, failures = in_rounds({name: partial(measure, each) for name, each in tasks.items()}, options.rounds)
    return report(machine, tasks, rounds, failures)


def report(
    machine: Mapping[str, object], tasks: Mapping[str, Task], rounds: Rounds, failures: Mapping[str, str]
) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""

    def spread(name: str, value: Callable[[Measurement], float]) -> Spread | None:
        found = [value(measured[name]) for measured in rounds if name in measured]
        return Spread.of(found) if found else None

    figures = []
    rows: list[tuple[str, ...]] = [
        ("variant", "minibatches/s", "of 1/T_max", "ideal", "cores busy", "late %", "busy, each stage")
    ]
    for name, each in tasks.items():
        t_max = longest(each)
        rate = spread(name, lambda found: found.rate)
        share = None if rate is None else Spread(*(value * t_max for value in (rate.median, rate.low, rate.high)))
        aimed = round(1000 * t_max) == TARGET_MS
        figures.append(
            Figure(
                f"of 1/T_max, {name}, k = 4, Nm = {each.in_flight}",
                share,
                target=TARGET if aimed else None,
                digits=3,
            )
        )
        if rate is None or share is None:
            rows.append((name, "failed", *[""] * 5))
            continue
        last = next(measured[name] for measured in reversed(rounds) if name in measured)
        cores = spread(name, lambda found: found.cores)
        late = spread(name, _late)
        assert cores is not None
        assert late is not None
        rows.append(
            (
                name,
                f"{rate.median:.2f}",
                f"{share.median:.3f}",
                f"{ideal(each):.3f}",
                f"{cores.median:.2f}",
                f"{100 * late.median:.1f}",
                " ".join(f"{busy:.2f}" for busy in _busy(last)),
            )
        )
    text = [
        f"{NAME}: four emulated stages under a Trainer, Nm = {TASK.in_flight}; {TASK.layers} x"
        f" Linear({TASK.width}, {TASK.width}), batch {TASK.batch}",
        provenance(machine, len(rounds)),
        "",
        table(rows),
        "",
        figures_table(figures, "fraction"),
        *(f"\nfailed: {name}\n{reason}" for name, reason in failures.items()),
    ]
    data = {
        "machine": dict(machine),
        "tasks": {name: asdict(each) for name, each in tasks.items()},
        "ideal": {name: ideal(each) for name, each in tasks.items()},
        "rounds": [{name: asdict(value) for name, value in measured.items()} for measured in rounds],
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)


def _late(measurement: Measurement) -> float:
    """The share of forwards and backwards that took longer than told."""
    return float(str(measurement.notes["overruns"])) / max(1.0, float(str(measurement.notes["passes"])))


def _busy(measurement: Measurement) -> Sequence[float]:
    busy = measurement.notes["busy"]
    assert isinstance(busy, Sequence)
    return [float(each) for each in busy]
