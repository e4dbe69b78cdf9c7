"""The paper's allocations NP and ED-local, run on four machines that are network namespaces with emulated devices."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Protocol

from benchmarks.ed_local_worker import SPEEDS, Task
from benchmarks.harness import (
    Figure,
    Options,
    Outcome,
    Process,
    ProcessFailed,
    Spread,
    in_rounds,
    run_together,
    table,
)
from benchmarks.machine import describe_machine, provenance
from tests.support.namespaces import Machine, Unavailable, network

NAME = "ed_local"
WORKER = "benchmarks.ed_local_worker"
TIMEOUT = 900.0
RATES: Mapping[str, str] = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit"}
NP, ED = "NP", "ED-local"


class WorkerTask(Protocol):
    """Arguments of a worker."""

    def to_json(self) -> str: ...


@dataclass(frozen=True)
class Found:
    """Measurement of one allocation over one link."""

    rate: float
    """Minibatches per second of all virtual workers."""
    bytes: float
    """Bytes on the wire of the last machine, both ways, headers included, for each minibatch of all virtual workers."""
    weight: str
    """The sum of the first layer's weights at the end, exactly."""


def measure(task: Task, rate: str | None) -> Found:
    """Trains on four fresh machines.

    Raises:
        ProcessFailed: also if this machine makes no network namespaces.
    """
    try:
        with network(len(SPEEDS), rate) as machines:
            started = machines[:1] if task.allocation == "one machine" else machines
            told_of = [one for each in run_together(on_each(started, WORKER, task), TIMEOUT) for one in each]
    except Unavailable as why:
        raise ProcessFailed(str(why)) from None
    machine_bytes = float(str(told_of[-1].notes["bytes"])) / len(told_of)
    (weight,) = {str(each.notes["weight"]) for each in told_of}
    return Found(sum(each.rate for each in told_of), machine_bytes, weight)


def on_each(machines: Sequence[Machine], module: str, task: WorkerTask) -> list[Process]:
    """The workers of ``module``, one command on each of ``machines``."""
    told = {"MASTER_ADDR": machines[0].address, "MASTER_PORT": 29500, "HETPIPE_TOKEN": secrets.token_urlsafe(32)}
    settings = [f"{name}={value}" for name, value in told.items()]
    return [
        Process(module, (task.to_json(),), prefix=tuple(machine.apart("env", *settings, f"NODE_RANK={rank}")))
        for rank, machine in enumerate(machines)
    ]


def run(options: Options) -> Outcome:
    """Measures both allocations over each link in `options.rounds` interleaved rounds."""
    machine = describe_machine(())
    tasks = {NP: Task("np"), ED: Task("ed")}
    jobs: dict[str, Callable[[], Found]] = {
        _job(name, link): partial(measure, replace(task, warmup=4, steps=8) if options.quick else task, rate)
        for link, rate in RATES.items()
        for name, task in tasks.items()
    }
    rounds, failures = in_rounds(jobs, options.rounds)
    return report(machine, rounds, failures)


def report(
    machine: Mapping[str, object], rounds: Sequence[Mapping[str, Found]], failures: Mapping[str, str]
) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""
    task, speeds = Task("np"), ", ".join(map(str, SPEEDS))
    rows: list[Sequence[str]] = [("link", "minibatches/s", "range", "MB per minibatch")]
    for link in RATES:
        rows.append((link, *[""] * 3))
        rows += [_row(name, link, rounds) for name in (NP, ED)]
    bits = {each.weight for one in rounds for each in one.values()}
    megabytes, pace = task.weights_bytes / 1e6, task.seconds / sum(SPEEDS)
    text = [
        f"{NAME}: {len(SPEEDS)} nodes of {len(SPEEDS)} emulated devices each, of speeds {speeds}; {megabytes:.1f} MB of"
        f" weights, Nm = W = {task.in_flight}, D = 0; a stage of {ED} takes {pace:.2f} s for a minibatch",
        f"{provenance(machine, len(rounds))}; MB of one machine, sent and received, the last stages' with {ED}",
        "",
        table(rows),
        "",
        f"all runs have the same weights in the end: {'yes' if len(bits) == 1 else 'NO'}",
    ]
    text += [f"\nfailed: {job}\n{reason}" for job, reason in failures.items()]
    data = {
        "machine": dict(machine),
        "weights_bytes": task.weights_bytes,
        "rounds": [{job: asdict(found) for job, found in each.items()} for each in rounds],
        "failures": dict(failures),
    }
    figures = [Figure(f"{ED} over {NP}, {link}", over_np(link, rounds)) for link in RATES]
    return Outcome("\n".join(text), data, complete=not failures and len(bits) == 1, figures=figures)


def over_np(link: str, rounds: Sequence[Mapping[str, Found]]) -> Spread | None:
    """Minibatches per second of ED-local over NP's, formed within each round; None if no round has both."""
    return Spread.of_ratios(rounds, _job(ED, link), _job(NP, link), lambda found: found.rate)


def _job(name: str, link: str) -> str:
    return f"{name}, {link}"


def _row(name: str, link: str, rounds: Sequence[Mapping[str, Found]]) -> Sequence[str]:
    found = [each[job] for each in rounds if (job := _job(name, link)) in each]
    if not found:
        return (f"  {name}", "failed", "", "")
    speed = Spread.of(each.rate for each in found)
    nbytes = Spread.of(each.bytes for each in found)
    return (
        f"  {name}",
        f"{speed.median:.2f}",
        f"{speed.low:.2f} .. {speed.high:.2f}",
        f"{nbytes.median / 1e6:.2f}",
    )
