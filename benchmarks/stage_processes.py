"""Two stages as processes, as threads, and two processes that share nothing, on two cores, with four models."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

from benchmarks.harness import Figure, Measurement, Options, Outcome, Spread, figures_table, in_rounds, table
from benchmarks.machine import describe_machine, provenance, two_cores
from benchmarks.training_task import ModelName, Task
from benchmarks.two_stages import NAMES, TASKS, measure, measure_two_at_once

NAME = "stage_processes"

ONE_THREAD = "plain Trainer, one thread"
INDEPENDENT = "two of these at once, a core each"
THREADS = "two stages, threads"
PROCESSES = "two stages, processes"
DEEPER = "two stages, processes, one more in flight"

VARIANTS = (ONE_THREAD, INDEPENDENT, THREADS, PROCESSES, DEEPER)

TARGET = 0.95
"""Least part of what two processes reach that share nothing, hoped for of stages as processes."""

Round = Mapping[tuple[ModelName, str], Mapping[str, Measurement]]
"""By model and variant, its one measurement."""


def jobs(task: Task) -> dict[str, Callable[[], dict[str, Measurement]]]:
    """The variants of what ``task`` asks a plain Trainer to do."""
    threads = replace(task, variant="strategy")
    processes = replace(threads, stage_hosts="processes")
    return {
        ONE_THREAD: partial(measure, task),
        INDEPENDENT: partial(measure_two_at_once, task),
        THREADS: partial(measure, threads),
        PROCESSES: partial(measure, processes),
        DEEPER: partial(measure, replace(processes, in_flight=task.stages + 2)),
    }


def run(options: Options) -> Outcome:
    """Measures all variants of all models in `options.rounds` interleaved rounds."""
    cores = two_cores()
    machine = describe_machine(cores)
    tasks = {task.model: replace(task, cores=cores) for task in TASKS.values()}
    if options.quick:
        tasks = {model: replace(task, warmup=5, steps=8, tail=5) for model, task in tasks.items()}
    every = {(model, variant): job for model, task in tasks.items() for variant, job in jobs(task).items()}
    names = {f"{NAMES[model]}: {variant}": (model, variant) for model, variant in every}
    rounds, failures = in_rounds({name: every[key] for name, key in names.items()}, options.rounds)
    return report(machine, [{names[name]: found for name, found in each.items()} for each in rounds], failures)


def report(machine: Mapping[str, object], rounds: Sequence[Round], failures: Mapping[str, str]) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""
    rows: list[tuple[str, ...]] = [("model, variant", "minibatches/s", "range", "cores busy", "CPU ms each")]
    figures: list[Figure] = []
    for model, name in NAMES.items():
        for variant in VARIANTS:
            if found := _found(rounds, model, variant):
                rate = Spread.of(each.rate for each in found)
                busy = Spread.of(each.cores for each in found).median
                cost = Spread.of(1000 * each.cores / each.rate for each in found).median
                span = f"{rate.low:.2f} .. {rate.high:.2f}"
                rows.append((f"{name}, {variant}", f"{rate.median:.2f}", span, f"{busy:.2f}", f"{cost:.0f}"))
        figures += [
            Figure(f"{label}, {name}", compare(rounds, model, over, under), target=target)
            for label, over, under, target in (
                ("processes over independent ones", PROCESSES, INDEPENDENT, TARGET),
                ("processes, one more in flight, over independent ones", DEEPER, INDEPENDENT, None),
                ("threads over independent processes", THREADS, INDEPENDENT, None),
                ("processes over one thread", PROCESSES, ONE_THREAD, None),
            )
        ]
    text = [f"{NAME}: two stages on two cores", provenance(machine, len(rounds)), "", table(rows), ""]
    text += [figures_table(figures), *(f"\nfailed: {name}\n{reason}" for name, reason in failures.items())]
    data = {
        "machine": dict(machine),
        "rounds": [
            {
                f"{model} {variant}": [asdict(value) for value in found.values()]
                for (model, variant), found in each.items()
            }
            for each in rounds
        ],
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)


def compare(rounds: Sequence[Round], model: ModelName, over: str, under: str) -> Spread | None:
    """Summarises a ratio of minibatches per second that is formed within each round; None if no round has both."""
    return Spread.of_ratios(rounds, (model, over), (model, under), lambda found: _one(found).rate)


def _found(rounds: Sequence[Round], model: ModelName, variant: str) -> list[Measurement]:
    return [_one(each[model, variant]) for each in rounds if (model, variant) in each]


def _one(found: Mapping[str, Measurement]) -> Measurement:
    (measurement,) = found.values()
    return measurement
