"""Time that `import lightning_hetpipe` adds to `import lightning`, in fresh processes."""

from __future__ import annotations

import compileall
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial

from benchmarks.harness import (
    ROOT,
    Figure,
    Measurement,
    Options,
    Outcome,
    Process,
    Spread,
    figures_table,
    in_rounds,
    run_alone,
)
from benchmarks.machine import describe_machine

NAME = "import_time"
WORKER = "benchmarks.import_time_worker"
TIMEOUT = 300.0
TARGET_MS = 150.0
PROCESSES = 3
"""In each round."""

Rounds = Sequence[Mapping[str, Sequence[Measurement]]]


def measure(processes: int) -> list[Measurement]:
    """Measures in so many fresh processes, one after the other."""
    return [run_alone(Process(WORKER, ()), TIMEOUT) for _ in range(processes)]


def run(options: Options) -> Outcome:
    """Measures in `options.rounds` rounds, after one process that fills the system's caches and does not count."""
    machine = describe_machine(())
    compileall.compile_dir(ROOT / "lightning_hetpipe", quiet=1)  # as pip does for what it installs, Lightning too
    in_rounds({"to warm up": partial(measure, 1)}, 1)
    rounds, failures = in_rounds({NAME: partial(measure, PROCESSES)}, options.rounds)
    return report(machine, rounds, failures)


def report(machine: Mapping[str, object], rounds: Rounds, failures: Mapping[str, str]) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""
    found = [each for one in rounds for each in one.get(NAME, ())]

    def milliseconds(name: str) -> Spread | None:
        return Spread.of(1000 * float(str(each.notes[name])) for each in found) if found else None

    figures = [
        Figure(
            "import lightning_hetpipe, after import lightning",
            milliseconds("package_s"),
            unit="ms",
            target=TARGET_MS,
            at_most=True,
            digits=0,
        ),
        Figure("import lightning_hetpipe, CPU time", milliseconds("package_cpu_s"), unit="ms", digits=0),
        Figure("import lightning", milliseconds("lightning_s"), unit="ms", digits=0),
    ]
    imported = found[-1].notes["modules"] if found else "?"
    text = [
        f"{NAME}: fresh processes, {imported} modules on top of Lightning's",
        f"on {machine['cpu']}; torch {machine['torch']}, lightning {machine['lightning']}",
        f"load average at the start {machine['load_average']}; medians and ranges over {len(found)} processes",
        "",
        figures_table(figures, "milliseconds"),
        *(f"\nfailed: {name}\n{reason}" for name, reason in failures.items()),
    ]
    data = {
        "machine": dict(machine),
        "processes": [asdict(each) for each in found],
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=bool(found) and not failures, figures=figures)
