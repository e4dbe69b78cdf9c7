"""Cost of `timeline=True`: the same training with and without it, alternating in one process.

A percent is less than what two processes that do the same differ by on a shared machine, and by what one and the same
process does a minute later. So each process trains with it and without, several times and in alternating order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from benchmarks.harness import Figure, Measurement, Options, Outcome, Process, Spread, in_rounds, run_together, table
from benchmarks.machine import describe_machine, provenance, two_cores
from benchmarks.training_task import WORKER, Task
from benchmarks.virtual_workers import T_MAX, pads

NAME = "timeline_costs"
TIMEOUT = 600.0
TARGET = 0.98


@dataclass(frozen=True)
class Pair:
    """Two variants that differ by the timeline alone."""

    label: str
    off: Task

    @property
    def on(self) -> Task:
        return replace(self.off, timeline=True)


@dataclass(frozen=True)
class Compared:
    """Measurement of a pair by one process."""

    off: Measurement
    on: Measurement

    @property
    def ratio(self) -> float:
        """Minibatches per second with the timeline over those without."""
        return self.on.rate / self.off.rate

    @property
    def more_cpu(self) -> float:
        """CPU seconds that a minibatch takes more with it."""
        return self.on.cores / self.on.rate - self.off.cores / self.off.rate


Round = Mapping[str, Compared]
"""By the labels of pairs."""


EMULATED = Task(
    "strategy",
    layers=4,
    width=64,
    batch=4,
    momentum=0.0,
    warmup=30,
    steps=60,
    tail=12,
    turns=4,
    stages=4,
    in_flight=6,
    pads=pads(0.6 * T_MAX, T_MAX, 0.8 * T_MAX, 0.5 * T_MAX),
)
WIDE = Task("strategy", width=256, batch=128, warmup=20, steps=100, tail=12, turns=10)
PAIRS = (
    Pair("a four emulated stages, longest 20 ms", EMULATED),
    Pair("b two real stages, width 256", WIDE),
    Pair("c two real stages, width 16", replace(WIDE, width=16, batch=16, warmup=40, steps=300, turns=8)),
)
"""The last one has next to nothing to compute: what is measured there is what a minibatch itself costs."""


def measure(pair: Pair) -> Compared:
    """Measures a pair in a process of its own."""
    tasks = (pair.off.to_json(), pair.on.to_json())
    ((off, on),) = run_together([Process(WORKER, tasks)], TIMEOUT)
    return Compared(off, on)


def shortened(pair: Pair) -> Pair:
    """Windows that give a first impression."""
    return replace(pair, off=replace(pair.off, warmup=pair.off.warmup // 2, turns=2))


def run(options: Options) -> Outcome:
    """Measures all pairs in `options.rounds` interleaved rounds."""
    cores = two_cores()
    machine = describe_machine(cores)
    pairs = [replace(pair, off=replace(pair.off, cores=cores)) for pair in PAIRS]
    if options.quick:
        pairs = [shortened(pair) for pair in pairs]
    rounds, failures = in_rounds({pair.label: partial(measure, pair) for pair in pairs}, options.rounds)
    return report(machine, rounds, failures)


def compare(rounds: Sequence[Round], pair: Pair) -> Spread | None:
    """Minibatches per second with the timeline over those without, over the rounds that have it; None if none has."""
    found = _found(rounds, pair)
    return Spread.of(each.ratio for each in found) if found else None


def _found(rounds: Sequence[Round], pair: Pair) -> list[Compared]:
    return [measured[pair.label] for measured in rounds if pair.label in measured]


def report(machine: Mapping[str, object], rounds: Sequence[Round], failures: Mapping[str, str]) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""
    rows: list[tuple[str, ...]] = [
        ("variant", "off /s", "on /s", "on/off", "range", "target", "", "us more", "CPU us more")
    ]
    figures = [
        Figure(
            f"{pair.label[2:]}: speed with the timeline over without",
            compare(rounds, pair),
            target=TARGET,
            digits=3,
        )
        for pair in PAIRS
    ]
    for pair, figure in zip(PAIRS, figures, strict=True):
        if figure.spread is None:
            rows.append((pair.label, "?", "?", *figure.cells(), "", ""))
            continue
        found = _found(rounds, pair)
        off = Spread.of(each.off.rate for each in found).median
        on = Spread.of(each.on.rate for each in found).median
        more = 1e6 * (1 / figure.spread.median - 1) / off
        more_cpu = 1e6 * Spread.of(each.more_cpu for each in found).median
        rows.append((pair.label, f"{off:.1f}", f"{on:.1f}", *figure.cells(), f"{more:.0f}", f"{more_cpu:.0f}"))
    text = [
        f"{NAME}: HetPipeStrategy(timeline=True) against timeline=False, minibatches per second",
        provenance(machine, len(rounds)),
        "",
        table(rows),
        *(f"\nfailed: {pair}\n{reason}" for pair, reason in failures.items()),
    ]
    spreads = {pair.label: figure.spread for pair, figure in zip(PAIRS, figures, strict=True)}
    data = {
        "machine": dict(machine),
        "tasks": {pair.label: asdict(pair.off) for pair in PAIRS},
        "rounds": [{label: asdict(value) for label, value in measured.items()} for measured in rounds],
        "ratios": {label: None if spread is None else asdict(spread) for label, spread in spreads.items()},
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)
