"""Gain and cost of `compile=True`: minibatches per second over those uncompiled, and seconds to compile."""

from collections.abc import Mapping, Sequence
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
from benchmarks.two_stages import NAMES, TASKS

NAME = "compile"
TIMEOUT = 900.0

PLAIN = "as they are"
COMPILED = "compiled"

Round = Mapping[str, Measurement]


def tasks(options: Options, cores: tuple[int, ...]) -> list[Task]:
    """Two stages of each model that needs nothing but torch; with `--quick` a small one of Linears alone."""
    found = [
        replace(task, variant="strategy", cores=cores, stages=2) for task in TASKS.values() if task.model != "bert"
    ]
    if options.quick:
        return [replace(found[0], layers=4, width=256, warmup=8, steps=8, tail=6)]
    return found


def variant(task: Task) -> str:
    """The task's name in the table."""
    return f"{NAMES[task.model]}, layers {COMPILED if task.compile else PLAIN}"


def measure(task: Task) -> Measurement:
    """Measures one process."""
    return run_alone(Process(WORKER, (task.to_json(),)), TIMEOUT)


def run(options: Options) -> Outcome:
    """Measures each model both ways in `options.rounds` interleaved rounds."""
    cores = two_cores()
    machine = describe_machine(cores)
    plain = tasks(options, cores)
    both = [each for task in plain for each in (task, replace(task, compile=True))]
    rounds, failures = in_rounds({variant(task): partial(measure, task) for task in both}, options.rounds)
    return report(machine, plain, rounds, failures)


def report(
    machine: Mapping[str, object], plain: Sequence[Task], rounds: Sequence[Round], failures: Mapping[str, str]
) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""
    rows: list[tuple[str, ...]] = [("variant", "minibatches/s", "range", "loss", "seconds to compile")]
    figures: list[Figure] = []
    for task in plain:
        pair = [variant(task), variant(replace(task, compile=True))]
        for name in pair:
            found = [measured[name] for measured in rounds if name in measured]
            if not found:
                rows.append((name, "failed", "", "", ""))
                continue
            rate = Spread.of(each.rate for each in found)
            spread = f"{rate.low:.2f} .. {rate.high:.2f}"
            loss = "?" if found[-1].loss is None else f"{found[-1].loss:.4f}"
            rows.append(
                (name, f"{rate.median:.2f}", spread, loss, f"{seconds(found).median:.1f}" if name == pair[1] else "")
            )
        common = [measured for measured in rounds if all(name in measured for name in pair)]
        ratios = [one[pair[1]].rate / one[pair[0]].rate for one in common]
        took = seconds([one[pair[1]] for one in common]) if common else None
        model = NAMES[task.model]
        figures += [
            Figure(f"compile: minibatches/s, over those uncompiled, {model}", Spread.of(ratios) if ratios else None),
            Figure(f"compile: seconds to compile two stages, {model}", took, unit="s", digits=1),
        ]
    text = [
        f"{NAME}: " + "; ".join(f"{NAMES[each.model]} of {each.layers} layers, batch {each.batch}" for each in plain),
        f"{provenance(machine, len(rounds))}, in each {plain[0].steps} minibatches after {plain[0].warmup}; two stages",
        "",
        table(rows),
        "",
        figures_table(figures),
        *(f"\nfailed: {name}\n{reason}" for name, reason in failures.items()),
    ]
    data = {
        "machine": dict(machine),
        "tasks": [asdict(task) for task in plain],
        "rounds": [{name: asdict(value) for name, value in measured.items()} for measured in rounds],
        "ratios": {each.name: None if each.spread is None else asdict(each.spread) for each in figures},
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)


def seconds(measurements: Sequence[Measurement]) -> Spread:
    """Seconds to compile all stages, one at a time. Torch's cache on disk makes later rounds faster."""
    return Spread.of(sum(each.numbers("compile_s")) for each in measurements)
