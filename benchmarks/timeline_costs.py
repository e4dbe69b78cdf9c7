"""What `timeline=True` costs: the same training with and without it, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from benchmarks.harness import Figure, Measurement, Options, Outcome, Process, Spread, in_rounds, run_alone, table
from benchmarks.machine import describe_machine, provenance, two_cores
from benchmarks.training_task import WORKER, Task
from benchmarks.virtual_workers import T_MAX, pads

NAME = "timeline_costs"
TIMEOUT = 600.0
TARGET = 0.98

Round = Mapping[str, Measurement]


@dataclass(frozen=True)
class Pair:
    """Two variants that differ by the timeline alone."""

    label: str
    task: Task

    @property
    def off(self) -> str:
        return f"{self.label}, off"

    @property
    def on(self) -> str:
        return f"{self.label}, on"


EMULATED = Task(
    "strategy",
    layers=4,
    width=64,
    batch=4,
    momentum=0.0,
    warmup=40,
    steps=200,
    tail=12,
    stages=4,
    in_flight=6,
    pads=pads(0.6 * T_MAX, T_MAX, 0.8 * T_MAX, 0.5 * T_MAX),
)
PAIRS = (
    Pair("a four emulated stages, longest 20 ms", EMULATED),
    Pair("b two real stages, width 256", Task("strategy", width=256, batch=128, warmup=40, steps=400, tail=12)),
    Pair("c two real stages, width 16", Task("strategy", width=16, batch=16, warmup=80, steps=1200, tail=12)),
)
"""The last one has next to nothing to compute: what is measured there is what a minibatch itself costs."""


def tasks() -> dict[str, Task]:
    """Each variant, by its name."""
    return {name: replace(p.task, timeline=on) for p in PAIRS for name, on in ((p.off, False), (p.on, True))}


def measure(task: Task) -> Measurement:
    """Measures one variant in a process of its own."""
    return run_alone(Process(WORKER, (task.to_json(),)), TIMEOUT)


def shortened(task: Task) -> Task:
    """A window that gives a first impression."""
    return replace(task, warmup=task.warmup // 2, steps=task.steps // 4)


def run(options: Options) -> Outcome:
    """Measures all variants in `options.rounds` interleaved rounds."""
    cores = two_cores()
    machine = describe_machine(cores)
    chosen = {name: replace(task, cores=cores) for name, task in tasks().items()}
    if options.quick:
        chosen = {name: shortened(task) for name, task in chosen.items()}
    rounds, failures = in_rounds({name: partial(measure, task) for name, task in chosen.items()}, options.rounds)
    return report(machine, rounds, failures)


def compare(rounds: Sequence[Round], pair: Pair) -> Spread | None:
    """Minibatches per second with the timeline over those without, formed in each round; None if none has both."""
    both = [measured for measured in rounds if pair.on in measured and pair.off in measured]
    return Spread.of(each[pair.on].rate / each[pair.off].rate for each in both) if both else None


def more_cpu(rounds: Sequence[Round], pair: Pair) -> float:
    """CPU seconds that a minibatch takes more with the timeline: what other programs do counts less there."""
    both = [each for each in rounds if pair.on in each and pair.off in each]
    return Spread.of(_cpu(each[pair.on]) - _cpu(each[pair.off]) for each in both).median


def _cpu(measurement: Measurement) -> float:
    return measurement.cores / measurement.rate


def report(machine: Mapping[str, object], rounds: Sequence[Round], failures: Mapping[str, str]) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""
    rows: list[tuple[str, ...]] = [
        ("variant", "off /s", "on /s", "on/off", "range", "target", "", "us more", "CPU us more")
    ]
    figures = [
        Figure(f"{p.label[2:]}: speed with the timeline over without", compare(rounds, p), target=TARGET, digits=3)
        for p in PAIRS
    ]
    for pair, figure in zip(PAIRS, figures, strict=True):
        if figure.spread is None:
            rows.append((pair.label, "?", "?", *figure.cells(), "", ""))
            continue
        off, on = (Spread.of(each[n].rate for each in rounds if n in each).median for n in (pair.off, pair.on))
        rows.append(
            (
                pair.label,
                f"{off:.1f}",
                f"{on:.1f}",
                *figure.cells(),
                f"{1e6 * (1 / figure.spread.median - 1) / off:.0f}",
                f"{1e6 * more_cpu(rounds, pair):.0f}",
            )
        )
    text = [
        f"{NAME}: HetPipeStrategy(timeline=True) against timeline=False, minibatches per second",
        provenance(machine, len(rounds)),
        "",
        table(rows),
        *(f"\nfailed: {variant}\n{reason}" for variant, reason in failures.items()),
    ]
    spreads = {pair.label: figure.spread for pair, figure in zip(PAIRS, figures, strict=True)}
    data = {
        "machine": dict(machine),
        "tasks": {name: asdict(task) for name, task in tasks().items()},
        "rounds": [{name: asdict(value) for name, value in measured.items()} for measured in rounds],
        "ratios": {label: None if spread is None else asdict(spread) for label, spread in spreads.items()},
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)
