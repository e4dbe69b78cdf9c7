"""A layer that two cores divide, over the same layer in one thread: one that is wide, and one that is not worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
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
)
from benchmarks.machine import describe_machine, provenance, two_cores
from benchmarks.split_layers_worker import Job

NAME = "split_layers"
WORKER = "benchmarks.split_layers_worker"
TIMEOUT = 600.0
TARGET = 1.7

WIDE, SMALL = "wide", "small"
NETS: Mapping[str, str] = {
    WIDE: "Conv2d(64, 256, 3) on 8 images of 56 x 56",
    SMALL: "Linear(64, 64), ReLU, Linear(64, 64) on 32 vectors",
}


def measure(job: Job) -> Measurement:
    """Measures in a fresh process with one torch thread for each operation."""
    return run_alone(Process(WORKER, (job.to_json(),)), TIMEOUT)


def variant(net: str, divided: bool) -> str:
    """Name of a measurement in a round."""
    return f"{net}, divided in two" if divided else f"{net}, one thread"


def run(options: Options) -> Outcome:
    """Measures both nets, divided and not, in `options.rounds` interleaved rounds."""
    cores = two_cores()
    machine = describe_machine(cores)
    steps = {WIDE: 15 if options.quick else 40, SMALL: 150 if options.quick else 600}
    jobs = {
        variant(net, divided): partial(measure, Job(net, divided, cores, steps[net]))
        for net in NETS
        for divided in (True, False)
    }
    rounds, failures = in_rounds(jobs, options.rounds)
    return report(machine, rounds, failures)


def report(
    machine: Mapping[str, object], rounds: Sequence[Mapping[str, Measurement]], failures: Mapping[str, str]
) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""

    def ratio(net: str) -> Spread | None:
        return Spread.of_ratios(rounds, variant(net, True), variant(net, False), lambda each: each.rate)

    def bound(net: str) -> Spread | None:
        return Spread.of_ratios(
            rounds, variant(net, False), variant(net, True), lambda each: float(str(each.notes["longest_s"]))
        )

    figures = [
        Figure("a wide convolution divided in two on two cores, over one thread", ratio(WIDE), target=TARGET),
        Figure("the same by CPU time of what cannot overlap", bound(WIDE)),
        Figure("two small linear layers divided in two, over one thread", ratio(SMALL)),
        Figure("the same by CPU time of what cannot overlap", bound(SMALL)),
    ]
    text = [
        f"{NAME}: one stage on a group of two, over the same model alone on one device; in_flight=1",
        *(f"{net}: {described}" for net, described in NETS.items()),
        provenance(machine, len(rounds)),
        "",
        figures_table(figures, "ratio of minibatches per second"),
        *(f"\nfailed: {name}\n{reason}" for name, reason in failures.items()),
    ]
    data = {
        "machine": dict(machine),
        "rounds": [{name: asdict(value) for name, value in measured.items()} for measured in rounds],
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)
