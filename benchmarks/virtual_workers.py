"""Several virtual workers: four of emulated stages against one of them, and two of one real stage against DDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
    run_together,
    table,
)
from benchmarks.machine import describe_machine, provenance, two_cores
from benchmarks.training_task import WORKER, Task

NAME = "virtual_workers"
TIMEOUT = 600.0
T_MAX = 0.020
SLOWER = 3
"""The emulated stages once more, so many times as slow: what is lost then was not for want of cores."""

Round = Mapping[str, Measurement]
"""A measurement of each variant that ran in the round, over all of its processes."""


@dataclass(frozen=True)
class Ratio:
    """Samples per second of `over`, over `times` as many of `under`; `target` is the least value hoped for."""

    label: str
    over: str
    under: str
    times: float = 1.0
    target: float | None = None


def pads(*stages: float) -> tuple[tuple[float, float], ...]:
    """Stages that take so many seconds per minibatch, a third of it forward."""
    return tuple((seconds / 3, seconds * 2 / 3) for seconds in stages)


# Little to compute for 1M parameters: eight emulated devices are to share two cores.
EMULATED = Task(
    "strategy",
    layers=4,
    width=512,
    batch=4,
    momentum=0.0,
    warmup=80,
    steps=240,
    tail=16,
    stages=4,
    in_flight=8,
    pads=pads(T_MAX, T_MAX, T_MAX, T_MAX),
)
UNEQUAL = replace(EMULATED, pads=pads(0.6 * T_MAX, T_MAX, 0.8 * T_MAX, 0.5 * T_MAX))
SLOW = replace(EMULATED, warmup=24, steps=96, pads=pads(*4 * [SLOWER * T_MAX]))

EQUAL_1, EQUAL_4, EQUAL_2 = "a one VW, four stages of 20 ms", "b four such VWs", "h two such VWs"
UNEQUAL_1, UNEQUAL_4 = "c one VW, stages of 12, 20, 16, 10 ms", "d four such VWs"
AHEAD_4 = "e as b, D = 1"
SLOW_1, SLOW_4 = "f one VW, four stages of 60 ms", "g four such VWs"

EMULATED_VARIANTS: Mapping[str, Task] = {
    EQUAL_1: EMULATED,
    EQUAL_4: replace(EMULATED, workers=4),
    UNEQUAL_1: UNEQUAL,
    UNEQUAL_4: replace(UNEQUAL, workers=4),
    AHEAD_4: replace(EMULATED, workers=4, clock_distance=1),
    SLOW_1: SLOW,
    SLOW_4: replace(SLOW, workers=4),
    EQUAL_2: replace(EMULATED, workers=2),
}
EMULATED_RATIOS = (
    Ratio("b/4a  four virtual workers over four times one", EQUAL_4, EQUAL_1, 4, 0.97),
    Ratio("d/4c  four virtual workers over four times one, unequal stages", UNEQUAL_4, UNEQUAL_1, 4),
    Ratio("e/4a  four virtual workers over four times one, D = 1", AHEAD_4, EQUAL_1, 4),
    Ratio("g/4f  four virtual workers over four times one, stages of 60 ms", SLOW_4, SLOW_1, 4),
    Ratio("h/2a  two virtual workers over two times one", EQUAL_2, EQUAL_1, 2),
)

REAL = Task("strategy", batch=128, warmup=12, steps=32, tail=8, workers=2, stages=1)

REAL_VWS, REAL_DDP = "p two VWs of one stage", "q DDP, two gloo processes"
REAL_PLAIN, REAL_AHEAD, REAL_LATE = "r plain Trainer, one process", "s as p, Nm = W = 4", "t as s, D = 1"

REAL_VARIANTS: Mapping[str, Task] = {
    REAL_VWS: REAL,
    REAL_DDP: replace(REAL, variant="ddp"),
    REAL_PLAIN: replace(REAL, variant="plain", workers=1, batch=256),
    REAL_AHEAD: replace(REAL, in_flight=4),
    REAL_LATE: replace(REAL, in_flight=4, clock_distance=1),
}
REAL_RATIOS = (
    Ratio("p/q  two virtual workers over DDP", REAL_VWS, REAL_DDP),
    Ratio("s/q  two virtual workers that look ahead over DDP", REAL_AHEAD, REAL_DDP),
    Ratio("t/q  two virtual workers that look ahead over DDP, D = 1", REAL_LATE, REAL_DDP),
    Ratio("p/r  two virtual workers over one process", REAL_VWS, REAL_PLAIN),
    Ratio("q/r  DDP over one process", REAL_DDP, REAL_PLAIN),
    Ratio("s/r  two virtual workers that look ahead over one process", REAL_AHEAD, REAL_PLAIN),
)
QUICK = (EQUAL_1, EQUAL_4, REAL_VWS, REAL_DDP, REAL_PLAIN)


def measure(task: Task) -> Measurement:
    """Measures the processes of `task` together: rates and cores add up, the rest is their mean."""
    (announced,) = run_together([Process(WORKER, (task.to_json(),))], TIMEOUT)
    return of_all(announced)


def of_all(announced: Sequence[Measurement]) -> Measurement:
    """One measurement over the processes that train one model."""

    def mean(name: str) -> float:
        return sum(number(each, name) for each in announced) / len(announced)

    losses = [each.loss for each in announced if each.loss is not None]
    return Measurement(
        announced[0].name,
        rate=sum(each.rate for each in announced),
        cores=sum(each.cores for each in announced),
        threads=announced[0].threads,
        loss=sum(losses) / len(losses) if losses else None,
        notes={"processes": len(announced), **{name: mean(name) for name in ("waited", "overruns", "passes")}},
    )


def number(measurement: Measurement, name: str) -> float:
    """A figure that was noted; 0 where it was not."""
    value = measurement.notes.get(name, 0)
    assert isinstance(value, int | float)
    return float(value)


def run(options: Options) -> Outcome:
    """Measures all variants in `options.rounds` interleaved rounds."""
    cores = two_cores()
    machine = describe_machine(cores)
    tasks = {name: replace(task, cores=cores) for name, task in {**EMULATED_VARIANTS, **REAL_VARIANTS}.items()}
    if options.quick:
        tasks = {name: shortened(tasks[name]) for name in QUICK}
    rounds, failures = in_rounds({name: partial(measure, task) for name, task in tasks.items()}, options.rounds)
    return report(machine, tasks, rounds, failures)


def shortened(task: Task) -> Task:
    """A window that gives a first impression."""
    return replace(task, warmup=48, steps=120, tail=8) if task.pads else replace(task, warmup=4, steps=8, tail=4)


def samples(tasks: Mapping[str, Task], measured: Round, variant: str) -> float:
    """Samples per second."""
    return measured[variant].rate * tasks[variant].batch


def compare(tasks: Mapping[str, Task], rounds: Sequence[Round], ratio: Ratio) -> Spread | None:
    """Summarises a ratio that is formed within each round; None if no round has both sides."""
    both = [measured for measured in rounds if ratio.over in measured and ratio.under in measured]
    if not both:
        return None
    return Spread.of(
        samples(tasks, measured, ratio.over) / samples(tasks, measured, ratio.under) / ratio.times for measured in both
    )


def report(
    machine: Mapping[str, object], tasks: Mapping[str, Task], rounds: Sequence[Round], failures: Mapping[str, str]
) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""
    emulated = [name for name in tasks if tasks[name].pads]
    real = [name for name in tasks if not tasks[name].pads]
    text = [
        f"{NAME}: wave synchronous parallel, one server, one torch thread per process",
        provenance(machine, len(rounds)),
    ]
    figures: list[Figure] = []
    for names, ratios, title in (
        (emulated, EMULATED_RATIOS, "emulated stages, Nm = W = 8, D = 0 unless it says otherwise; 1M parameters"),
        (real, REAL_RATIOS, "real stages, the same 256 samples in each step of all; 8.4M parameters"),
    ):
        found = [
            Figure(ratio.label, compare(tasks, rounds, ratio), target=ratio.target, digits=3)
            for ratio in ratios
            if ratio.over in names and ratio.under in names
        ]
        figures += found
        text += ["", title, "", table(_variant_rows(tasks, rounds, names)), "", figures_table(found)]
    text += [f"\nfailed: {variant}\n{reason}" for variant, reason in failures.items()]
    data = {
        "machine": dict(machine),
        "tasks": {name: asdict(task) for name, task in tasks.items()},
        "rounds": [{name: asdict(value) for name, value in measured.items()} for measured in rounds],
        "ratios": {each.name: None if each.spread is None else asdict(each.spread) for each in figures},
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)


def bound(task: Task) -> float | None:
    """Samples per second that stages which take as long as told could do at most: 1/T_max, of all VWs."""
    if not task.pads:
        return None
    return task.workers * task.batch / max(sum(pad) for pad in task.pads)


def _variant_rows(tasks: Mapping[str, Task], rounds: Sequence[Round], names: Sequence[str]) -> list[tuple[str, ...]]:
    header = (
        "variant",
        "samples/s",
        "range",
        "of 1/T_max",
        "cores busy",
        "wait/wave ms",
        "wait share",
        "late %",
        "loss",
    )
    rows: list[tuple[str, ...]] = [header]
    for name in names:
        found = [measured[name] for measured in rounds if name in measured]
        if not found:
            rows.append((name, "failed", *[""] * (len(header) - 2)))
            continue
        task = tasks[name]
        spread = Spread.of(samples(tasks, measured, name) for measured in rounds if name in measured)
        most = bound(task)
        waited = Spread.of(number(value, "waited") for value in found).median
        late = Spread.of(number(value, "overruns") / max(1.0, number(value, "passes")) for value in found).median
        synchronises = task.variant == "strategy" and task.workers > 1
        loss = found[-1].loss
        rows.append(
            (
                name,
                f"{spread.median:.1f}",
                f"{spread.low:.1f} .. {spread.high:.1f}",
                "" if most is None else f"{spread.median / most:.2f}",
                f"{Spread.of(value.cores for value in found).median:.2f}",
                f"{1000 * waited * wave_seconds(task, spread.median):.1f}" if synchronises else "",
                f"{waited:.2f}" if synchronises else "",
                "" if most is None else f"{100 * late:.1f}",
                "?" if loss is None else f"{loss:.4f}",
            )
        )
    return rows


def wave_seconds(task: Task, rate: float) -> float:
    """Seconds between the ends of two waves of a VW, at `rate` samples per second of all."""
    wave = task.wave or task.in_flight or 1  # one stage has one minibatch in flight, unless told otherwise
    return wave * task.batch * task.workers / rate
