"""Two machines, which are network namespaces, over links of several rates: virtual workers against Lightning's DDP."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

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
from benchmarks.machine import describe_machine, provenance, two_cores
from benchmarks.several_nodes_worker import Task
from tests.support.namespaces import Unavailable, network

NAME = "several_nodes"
WORKER = "benchmarks.several_nodes_worker"
TIMEOUT = 600.0

RATES: Mapping[str, str | None] = {"200 Mbit/s": "200mbit", "1 Gbit/s": "1gbit", "unlimited": None}
DDP = "Lightning's DDP (gloo)"
VARIANTS: Mapping[str, Task] = {
    DDP: Task("ddp"),
    "HetPipeStrategy, Nm = 4": Task("hetpipe"),
    "HetPipeStrategy, Nm = 4, bfloat16": Task("hetpipe", update_dtype="bfloat16"),
}


@dataclass(frozen=True)
class Found:
    """Measurement of one variant over one link, on both machines together except for `bytes`."""

    images: float
    """Per second."""
    bytes: float
    """On one machine's wire, both ways, headers included, for each minibatch that the machine trains."""
    loss: float


def measure(task: Task, rate: str | None) -> Found:
    """Trains on two fresh machines, a core each.

    Raises:
        ProcessFailed: also if this machine makes no network namespaces.
    """
    cores = two_cores()
    try:
        with network(2, rate) as machines:
            told = {"MASTER_ADDR": machines[0].address, "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
            told["HETPIPE_TOKEN"] = secrets.token_urlsafe(32)
            processes = []
            for node, machine in enumerate(machines):
                environment = [f"{name}={value}" for name, value in {**told, "NODE_RANK": node}.items()]
                pinned = ["taskset", "--cpu-list", str(cores[node])] if cores else []
                prefix = tuple(machine.apart("env", *environment, *pinned))
                processes.append(Process(WORKER, (task.to_json(),), prefix=prefix))
            both = [each for (each,) in run_together(processes, TIMEOUT)]
    except Unavailable as why:
        raise ProcessFailed(str(why)) from None
    per_minibatch = [float(str(each.notes["bytes"])) for each in both]
    losses = [each.loss for each in both if each.loss is not None]
    return Found(
        sum(each.rate for each in both) * task.batch,
        sum(per_minibatch) / len(per_minibatch),
        sum(losses) / len(losses),
    )


def run(options: Options) -> Outcome:
    """Measures every variant over every link in `options.rounds` interleaved rounds."""
    machine = describe_machine(two_cores())
    jobs: dict[str, Callable[[], Found]] = {
        _job(variant, link): partial(measure, replace(task, warmup=4, steps=8) if options.quick else task, rate)
        for link, rate in RATES.items()
        for variant, task in VARIANTS.items()
    }
    rounds, failures = in_rounds(jobs, options.rounds)
    return report(machine, rounds, failures)


def report(
    machine: Mapping[str, object], rounds: Sequence[Mapping[str, Found]], failures: Mapping[str, str]
) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""
    task = VARIANTS[DDP]
    size = task.layers * (task.width + 1) * task.width * 4
    rows: list[Sequence[str]] = [("link", "images/s", "range", "over DDP", "MB per minibatch", "loss")]
    for link in RATES:
        rows.append((link, *[""] * 5))
        for variant in VARIANTS:
            rows.append(_row(variant, link, rounds))
    text = [
        f"{NAME}: {task.layers} x Linear({task.width}, {task.width}), {size / 1e6:.1f} MB of weights, batch"
        f" {task.batch}, two machines of one core each",
        f"{provenance(machine, len(rounds))}; MB of"
        " one machine, sent and received; virtual workers with D = 0 and aggregate='mean'",
        "",
        table(rows),
    ]
    text += [f"\nfailed: {job}\n{reason}" for job, reason in failures.items()]
    data = {
        "machine": dict(machine),
        "weights_bytes": size,
        "rounds": [{job: asdict(found) for job, found in each.items()} for each in rounds],
        "failures": dict(failures),
    }
    figures = [
        Figure(f"{variant} over DDP, {link}", over_ddp(variant, link, rounds))
        for link in RATES
        for variant in VARIANTS
        if variant != DDP
    ]
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)


def over_ddp(variant: str, link: str, rounds: Sequence[Mapping[str, Found]]) -> Spread | None:
    """Images per second of `variant` over DDP's, formed within each round; None if no round has both."""
    return Spread.of_ratios(rounds, _job(variant, link), _job(DDP, link), lambda found: found.images)


def _job(variant: str, link: str) -> str:
    return f"{variant}, {link}"


def _row(variant: str, link: str, rounds: Sequence[Mapping[str, Found]]) -> Sequence[str]:
    found = [each[job] for each in rounds if (job := _job(variant, link)) in each]
    if not found:
        return (f"  {variant}", "failed", "", "", "", "")
    speed = Spread.of(each.images for each in found)
    over = over_ddp(variant, link, rounds)
    return (
        f"  {variant}",
        f"{speed.median:.0f}",
        f"{speed.low:.0f} .. {speed.high:.0f}",
        f"{over.median:.2f}" if over else "?",
        f"{Spread.of(each.bytes for each in found).median / 1e6:.1f}",
        f"{found[-1].loss:.4f}",
    )
