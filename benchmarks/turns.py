"""Pairs of tasks that take turns in one process: the same training with something and without it.

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

TIMEOUT = 600.0


@dataclass(frozen=True)
class Pair:
    """Two variants, without and with what is to be measured.

    Attributes:
        target: Smallest ratio of speed hoped for, or largest ratio of CPU time. None takes the target of all pairs.
    """

    label: str
    off: Task
    on: Task
    target: float | None = None


@dataclass(frozen=True)
class Compared:
    """Measurement of a pair by one process."""

    off: Measurement
    on: Measurement

    @property
    def ratio(self) -> float:
        """Minibatches per second with it over those without."""
        return self.on.rate / self.off.rate

    @property
    def cpu_ratio(self) -> float:
        """CPU seconds of a minibatch with it over those without."""
        return (self.on.cores / self.on.rate) / (self.off.cores / self.off.rate)

    @property
    def more_cpu(self) -> float:
        """CPU seconds that a minibatch takes more with it."""
        return self.on.cores / self.on.rate - self.off.cores / self.off.rate


Round = Mapping[str, Compared]
"""By the labels of pairs."""


@dataclass(frozen=True)
class Turns:
    """A benchmark of pairs.

    Attributes:
        name: Of the benchmark.
        title: First line of its text.
        pairs: Those to measure.
        figure: What a ratio is, for the table of all benchmarks.
        target: The least ratio hoped for; of CPU time the largest one.
        of_cpu: Whether figures compare CPU time and not speed.
        cores: CPU cores that a process may use, one or two.
    """

    name: str
    title: str
    pairs: Sequence[Pair]
    figure: str
    target: float
    of_cpu: bool = False
    cores: int = 2

    def cpus(self) -> tuple[int, ...]:
        """The CPUs that a process stays on."""
        return two_cores()[: self.cores]

    def run(self, options: Options) -> Outcome:
        """Measures all pairs in `options.rounds` interleaved rounds."""
        cores = self.cpus()
        machine = describe_machine(cores)
        pairs = [on_cores(pair, cores) for pair in self.pairs]
        if options.quick:
            pairs = [shortened(pair) for pair in pairs]
        rounds, failures = in_rounds({pair.label: partial(measure, pair) for pair in pairs}, options.rounds)
        return self.report(machine, rounds, failures)

    def report(self, machine: Mapping[str, object], rounds: Sequence[Round], failures: Mapping[str, str]) -> Outcome:
        """Turns the measurements into a text to read and data to keep."""
        ratio = "CPU on/off" if self.of_cpu else "on/off"
        rows: list[tuple[str, ...]] = [
            ("variant", "off /s", "on /s", ratio, "range", "target", "", "us more", "CPU us more")
        ]
        figures = [
            Figure(
                f"{pair.label[2:]}: {self.figure}",
                compare(rounds, pair, of_cpu=self.of_cpu),
                target=self.target if pair.target is None else pair.target,
                at_most=self.of_cpu,
                digits=3,
            )
            for pair in self.pairs
        ]
        for pair, figure in zip(self.pairs, figures, strict=True):
            if figure.spread is None:
                rows.append((pair.label, "?", "?", *figure.cells(), "", ""))
                continue
            found = _found(rounds, pair)
            off = Spread.of(each.off.rate for each in found).median
            on = Spread.of(each.on.rate for each in found).median
            speed = compare(rounds, pair)
            assert speed is not None
            more = 1e6 * (1 / speed.median - 1) / off
            more_cpu = 1e6 * Spread.of(each.more_cpu for each in found).median
            rows.append((pair.label, f"{off:.1f}", f"{on:.1f}", *figure.cells(), f"{more:.0f}", f"{more_cpu:.0f}"))
        text = [
            f"{self.name}: {self.title}, minibatches per second",
            provenance(machine, len(rounds)),
            "",
            table(rows),
            *(f"\nfailed: {pair}\n{reason}" for pair, reason in failures.items()),
        ]
        spreads = {pair.label: figure.spread for pair, figure in zip(self.pairs, figures, strict=True)}
        data = {
            "machine": dict(machine),
            "tasks": {pair.label: asdict(pair) for pair in self.pairs},
            "rounds": [{label: asdict(value) for label, value in measured.items()} for measured in rounds],
            "ratios": {label: None if spread is None else asdict(spread) for label, spread in spreads.items()},
            "failures": dict(failures),
        }
        return Outcome("\n".join(text), data, complete=not failures, figures=figures)


def measure(pair: Pair) -> Compared:
    """Measures a pair in a process of its own."""
    tasks = (pair.off.to_json(), pair.on.to_json())
    ((off, on),) = run_together([Process(WORKER, tasks)], TIMEOUT)
    return Compared(off, on)


def on_cores(pair: Pair, cores: tuple[int, ...]) -> Pair:
    """The pair on these CPUs."""
    return replace(pair, off=replace(pair.off, cores=cores), on=replace(pair.on, cores=cores))


def shortened(pair: Pair) -> Pair:
    """Windows that give a first impression."""
    off, on = (replace(task, warmup=task.warmup // 2, turns=2) for task in (pair.off, pair.on))
    return replace(pair, off=off, on=on)


def compare(rounds: Sequence[Round], pair: Pair, *, of_cpu: bool = False) -> Spread | None:
    """Minibatches per second with it over those without, over the rounds that have them; None if none has.

    With ``of_cpu``, CPU seconds of a minibatch with it over those without.
    """
    found = [each.cpu_ratio if of_cpu else each.ratio for each in _found(rounds, pair)]
    return Spread.of(found) if found else None


def _found(rounds: Sequence[Round], pair: Pair) -> list[Compared]:
    return [measured[pair.label] for measured in rounds if pair.label in measured]
