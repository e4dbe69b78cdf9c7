"""Layers that devices of unlike speed divide by their channels, beside pipelines of the same devices."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

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
from benchmarks.split_layers_worker import WORKER, Net, Task
from lightning_hetpipe.planning.model.cluster import Cluster, Device, Link, Node
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.plan import profile_file
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedMember
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.grouped_plans import plan_with_groups
from lightning_hetpipe.planning.search.problem import PlanningProblem

NAME = "split_layers"
TIMEOUT = 600.0
SPEEDS = (1.0, 2.0, 4.0)
SLOWEST = 8.0
"""Times that the slowest emulated device takes as long as a CPU: all together need less than one core."""
IN_FLIGHT = len(SPEEDS) + 1
"""Minibatches in flight of plans with several stages: one more than there can be, as no stage always takes the same."""

ALONE, STAGES, EVEN, UNEVEN = "the fastest device alone", "a stage on each", "split evenly", "split by speed"
ONE, PLAIN, TWO = "one thread", "plain Trainer, one thread", "split in two"
WHOLE, APART = "unsplit", "all layers split in two"

VARIANTS: Mapping[Net, Sequence[str]] = {
    "vgg": (ALONE, STAGES, EVEN, UNEVEN),
    "wide": (PLAIN, ONE, TWO),
    "narrow": (WHOLE, APART),
}
TITLES: Mapping[Net, str] = {
    "vgg": "a convolution that takes most of the time, on emulated devices of speeds 1, 2 and 4",
    "wide": "one wide convolution, on two cores",
    "narrow": "small layers, on two cores",
}

Round = Mapping[tuple[Net, str], Measurement]


@dataclass(frozen=True)
class Planned:
    """Plans of one net, by variant, and whether the search has joined devices."""

    plans: Mapping[str, Plan]
    joined: bool


def plans_of(net: Net, profile: Profile) -> Planned:
    """The plans that variants of ``net`` follow."""
    speeds = SPEEDS if net == "vgg" else (1.0, 1.0)
    box = Cluster([Node("box", [Device("cpu", speed=speed) for speed in speeds], Link("12 GB/s"))])
    names = [layer.name for layer in profile.layers]
    fastest = max(box.slots, key=lambda slot: slot.device.speed)

    def plan(found: Estimate) -> Plan:
        return Plan.of(found, profile.model, names, box)

    alone = plan(best_plan(PlanningProblem(profile, box, [fastest], optimizer="sgd")))
    stages = plan(best_plan(PlanningProblem(profile, box, optimizer="sgd"), IN_FLIGHT))
    uneven = plan(plan_with_groups(PlanningProblem(profile, box, optimizer="sgd"), IN_FLIGHT))
    even = divided_evenly(alone, box)
    found = {ALONE: alone, STAGES: stages, EVEN: even, UNEVEN: uneven, ONE: alone, TWO: even, WHOLE: alone, APART: even}
    joined = any(stage.group for stage in uneven.virtual_workers[0].stages)
    return Planned({name: found[name] for name in VARIANTS[net] if name != PLAIN}, joined)


def divided_evenly(plan: Plan, box: Cluster) -> Plan:
    """The one stage of ``plan`` divided among all devices of ``box`` in equal parts."""
    (worker,) = plan.virtual_workers
    (stage,) = worker.stages
    group = tuple(PlannedMember(stage.node, str(slot), 1.0) for slot in box.slots)
    return replace(plan, virtual_workers=(replace(worker, stages=(replace(stage, group=group),)),))


def run(options: Options) -> Outcome:
    """Measures all variants in `options.rounds` interleaved rounds."""
    cores = two_cores()
    machine = describe_machine(cores)
    with tempfile.TemporaryDirectory() as folder:
        joined = dict[Net, bool]()
        jobs = {}
        tasks = dict[Net, Task]()
        for net in VARIANTS:
            task = tasks[net] = Task(net, folder, steps=10 if options.quick else 24)
            run_alone(Process(WORKER, (task.to_json(),)), TIMEOUT)
            found = plans_of(net, profile_file.load(Path(folder, f"{net}.json")))
            joined[net] = found.joined
            for variant in VARIANTS[net]:
                own = replace(task, plain=True) if variant == PLAIN else replace(task, plan=f"{net} {variant}.json")
                if net == "vgg":
                    own = replace(own, factors={f"cpu:{n}": SLOWEST / speed for n, speed in enumerate(SPEEDS)})
                if variant != PLAIN:
                    found.plans[variant].save(Path(folder, own.plan))
                jobs[f"{net}: {variant}"] = partial(run_alone, Process(WORKER, (own.to_json(),)), TIMEOUT)
        keys: dict[str, tuple[Net, str]] = {f"{net}: {each}": (net, each) for net in VARIANTS for each in VARIANTS[net]}
        rounds, failures = in_rounds(jobs, options.rounds)
        measured = [{keys[name]: each for name, each in one.items()} for one in rounds]
        return report(machine, measured, joined, failures)


def report(
    machine: Mapping[str, object], rounds: Sequence[Round], joined: Mapping[Net, bool], failures: Mapping[str, str]
) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""
    text = [f"{NAME}: {provenance(machine, len(rounds))}"]
    for net, variants in VARIANTS.items():
        rows: list[tuple[str, ...]] = [("variant", "minibatches/s", "range")]
        for variant in variants:
            rates = [one[net, variant].rate for one in rounds if (net, variant) in one]
            spread = Spread.of(rates) if rates else None
            rows.append(
                (variant, "failed", "")
                if spread is None
                else (variant, f"{spread.median:.2f}", f"{spread.low:.2f} .. {spread.high:.2f}")
            )
        chosen = "joins the devices" if joined.get(net) else "joins no devices"
        text += ["", f"{TITLES[net]}; split='auto' {chosen}", "", table(rows)]
    figures = figures_of(rounds, joined)
    text += ["", figures_table(figures), *(f"\nfailed: {variant}\n{reason}" for variant, reason in failures.items())]
    data = {
        "machine": dict(machine),
        "rounds": [{f"{net}: {name}": asdict(each) for (net, name), each in one.items()} for one in rounds],
        "joined": dict(joined),
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)


def figures_of(rounds: Sequence[Round], joined: Mapping[Net, bool]) -> list[Figure]:
    """The figures that the benchmark is run for."""

    def ratio(net: Net, over: str, under: str, part: float = 1.0) -> Spread | None:
        found = Spread.of_ratios(rounds, (net, over), (net, under), lambda each: each.rate)
        return None if found is None else Spread(*(each * part for each in (found.median, found.low, found.high)))

    every = max(SPEEDS) / sum(SPEEDS)
    chosen = float(joined["narrow"]) if "narrow" in joined else None
    return [
        Figure(
            "split layers: three uneven devices, over the sum of their speeds",
            ratio("vgg", UNEVEN, ALONE, every),
            target=0.9,
        ),
        Figure("split layers: over the best plan of a stage on each device", ratio("vgg", UNEVEN, STAGES)),
        Figure("split layers: channels by speed, over equal parts", ratio("vgg", UNEVEN, EVEN)),
        Figure(
            "split layers: a wide convolution split in two on two cores, over one thread",
            ratio("wide", TWO, ONE),
            target=1.7,
        ),
        Figure("split layers: the same, over a plain Trainer", ratio("wide", TWO, PLAIN)),
        Figure("split layers: small layers split in two, over unsplit ones", ratio("narrow", APART, WHOLE)),
        Figure(
            "split layers: times that split='auto' joins devices there",
            None if chosen is None else Spread(chosen, chosen, chosen),
            target=0.0,
            at_most=True,
            digits=0,
        ),
    ]
