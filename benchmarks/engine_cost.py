"""Cost of the engine: microseconds per minibatch and stage without Lightning, and the hand-over at the turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial

from benchmarks.engine_cost_worker import PARTS, Job
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
from benchmarks.machine import describe_machine, two_cores

NAME = "engine_cost"
WORKER = "benchmarks.engine_cost_worker"
TIMEOUT = 300.0
STAGES = (1, 2, 4, 8)
ON_ONE_CORE = (2, 8)
"""Numbers of stages that are measured on one core, too: there threads take turns, and none waits for the GIL."""
TARGET_US = 150.0
HAND_OVER = ("resumed", "user code", "backward")
"""The parts that are the engine's; the loss between them is the user's, and autograd's."""

Rounds = Sequence[Mapping[str, Measurement]]
"""A measurement for each number of stages, and for those on one core."""


def on_one_core(k: int) -> str:
    """Name in rounds of the measurement of ``k`` stages on one core."""
    return f"{k} on one core"


def measure(job: Job) -> Measurement:
    """Measures in a fresh process with one torch thread."""
    found = run_alone(Process(WORKER, (job.to_json(),)), TIMEOUT)
    return found


def run(options: Options) -> Outcome:
    """Measures every number of stages in `options.rounds` interleaved rounds."""
    cores = two_cores()
    machine = describe_machine(cores)
    steps = 200 if options.quick else 500
    jobs = {str(k): partial(measure, Job(k, cores, steps=steps)) for k in STAGES}
    jobs |= {on_one_core(k): partial(measure, Job(k, cores[:1], steps=steps)) for k in ON_ONE_CORE}
    rounds, failures = in_rounds(jobs, options.rounds)
    return report(machine, rounds, failures)


def number(measurement: Measurement, name: str) -> float:
    """A figure that the worker has noted."""
    return float(str(measurement.notes[name]))


def parts(measurement: Measurement, stages: str) -> Mapping[str, float]:
    """The parts of the hand-over, while stages are "busy" or have "slept"."""
    found = measurement.notes[stages]
    assert isinstance(found, Mapping)
    return found


def cost(measurement: Measurement) -> float:
    """Microseconds of the engine itself, per minibatch and stage."""
    return number(measurement, "wall_us") - number(measurement, "bare_wall_us")


def cpu_cost(measurement: Measurement) -> float:
    """The same in CPU time of all threads, which other programs on the machine hardly change."""
    return number(measurement, "cpu_us") - number(measurement, "bare_cpu_us")


def turn(measurement: Measurement) -> float:
    """Microseconds of the hand-over at the turn, between stages that sleep."""
    return sum(parts(measurement, "slept")[part] for part in HAND_OVER)


def report(machine: Mapping[str, object], rounds: Rounds, failures: Mapping[str, str]) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""

    def spread(k: int | str, value: Callable[[Measurement], float]) -> Spread | None:
        found = [value(each) for each in _found(rounds, k)]
        return Spread.of(found) if found else None

    figures = [
        *(
            Figure(
                f"engine per minibatch and stage, k = {k}, Nm = {k + 2}",
                spread(k, cost),
                unit="µs",
                target=TARGET_US,
                at_most=True,
                digits=0,
            )
            for k in STAGES
        ),
        *(
            Figure(
                f"engine per minibatch and stage on one core, k = {k}, Nm = {k + 2}",
                spread(on_one_core(k), cost),
                unit="µs",
                target=TARGET_US,
                at_most=True,
                digits=0,
            )
            for k in ON_ONE_CORE
        ),
        *(
            Figure(f"engine's CPU time, k = {k}, Nm = {k + 2}", spread(k, cpu_cost), unit="µs", digits=0)
            for k in STAGES
        ),
        *(
            Figure(
                f"hand-over between last stage and user code, both ways, k = {k}, Nm = {k + 2}",
                spread(k, turn),
                unit="µs",
                digits=0,
            )
            for k in STAGES
        ),
    ]
    text = [
        f"{NAME}: stages of one multiplication each, without Lightning, Nm = k + 2",
        f"on {machine['cpu']}, {machine['cores_used']}; torch {machine['torch']}",
        f"load average at the start {machine['load_average']}; medians over {len(rounds)} round(s)",
        "",
        "microseconds per minibatch and stage",
        "",
        table(_cost_rows(rounds)),
        *_split(rounds),
        "",
        "microseconds of the hand-over between the last stage and user code",
        "",
        table(_turn_rows(rounds)),
        "",
        figures_table(figures, "microseconds"),
        *(f"\nfailed: k = {name}\n{reason}" for name, reason in failures.items()),
    ]
    data = {
        "machine": dict(machine),
        "rounds": [{name: asdict(value) for name, value in measured.items()} for measured in rounds],
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)


def _found(rounds: Rounds, k: int | str) -> list[Measurement]:
    return [measured[str(k)] for measured in rounds if str(k) in measured]


def _cost_rows(rounds: Rounds) -> list[tuple[str, ...]]:
    names = ("wall_us", "cpu_us", "bare_wall_us", "bare_cpu_us")
    rows: list[tuple[str, ...]] = [("k", "wall", "CPU", "modules alone, wall", "CPU", "cores busy")]
    measured: list[int | str] = [*STAGES, *map(on_one_core, ON_ONE_CORE)]
    for k in measured:
        found = _found(rounds, k)
        if not found:
            rows.append((str(k), "failed", *[""] * 4))
            continue
        medians = [Spread.of(number(each, name) for each in found).median for name in names]
        cores = Spread.of(each.cores for each in found).median
        rows.append((str(k), *(f"{median:.0f}" for median in medians), f"{cores:.2f}"))
    return rows


def _split(rounds: Rounds) -> list[str]:
    """Engine's CPU time that comes with each minibatch, and with each stage of it."""
    few, many = STAGES[0], STAGES[-1]
    both = [measured for measured in rounds if str(few) in measured and str(many) in measured]
    if not both:
        return []
    ends = [(few * cpu_cost(measured[str(few)]), many * cpu_cost(measured[str(many)])) for measured in both]
    stage = Spread.of((end - start) / (many - few) for start, end in ends).median
    start = Spread.of(start for start, _ in ends).median
    return [
        "",
        f"of the engine's CPU time, about {start - few * stage:.0f} µs come with each minibatch, and {stage:.0f} µs"
        " with each of its stages",
    ]


def _turn_rows(rounds: Rounds) -> list[tuple[str, ...]]:
    titles = ("output to thread", "to user code", "loss and its gradients", "gradients to backward")
    rows: list[tuple[str, ...]] = [("k, stages", *titles)]
    for k in STAGES:
        for stages in ("busy", "slept"):
            found = [parts(each, stages) for each in _found(rounds, k)]
            if found:
                medians = (Spread.of(each[part] for each in found).median for part in PARTS)
                rows.append((f"{k} {stages}", *(f"{median:.0f}" for median in medians)))
    return rows
