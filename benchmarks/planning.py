"""Quality of plans: compared with all others, a reference's dynamic program, splits by hand, and the engine."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

from benchmarks import reference_profile
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
from benchmarks.planning_problems import (
    IN_FLIGHT,
    STATE,
    best_in_flight,
    best_of_all,
    by_hand,
    large,
    rack,
    small,
    transformer,
)
from benchmarks.reference_graphs import BEST, DATA, busiest, file_of, missing
from benchmarks.schedule import task
from benchmarks.training_task import WORKER, Task
from lightning_hetpipe.planning.model.cluster import Cluster, Node
from lightning_hetpipe.planning.model.costs import Division
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.model.simulate import StageTimes, simulate
from lightning_hetpipe.planning.model.stage_memory import optimizer_state
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.divider import CLOSE
from lightning_hetpipe.planning.search.problem import PlanningProblem

NAME = "planning"
TIMEOUT = 300.0
PROBLEMS, QUICK_PROBLEMS = 100, 20
OPT_350M = "profiles/opt350.json"
OPTIMIZER = "adam"
LINK = "12 GB/s"

MIXES: Mapping[str, Sequence[str]] = {
    "2x V100-16, 2x RTX-3090": ("2xV100-16", "2xRTX-3090"),
    "Titan-RTX, RTX-2080, RTX-3090, V100-16": ("Titan-RTX", "RTX-2080", "RTX-3090", "V100-16"),
    "4x RTX-2080, A100-40": ("4xRTX-2080", "A100-40"),
}

EMULATED_MS = 40
EMULATED = {"bottleneck first": "first", "bottleneck in the middle": "in the middle", "bottleneck last": "last"}
EMULATED_IN_FLIGHT = (2, 3, 4, 6)
"""Minibatches in flight, with bubbles in the schedule and without."""
PLAIN = "plain Trainer"
"""The same training on one core: with next to nothing to compute, what a minibatch takes is Lightning's step."""

Rounds = Sequence[Mapping[str, Measurement]]


MANY = 1 << 20
"""Minibatches in flight at which nothing but T_max counts."""

CLUSTERS: Mapping[str, tuple[int, int, bool, int]] = {
    "2 nodes of 4": (2, 4, True, 24),
    "4 nodes of 4": (4, 4, True, 48),
    "16 nodes of 4": (16, 4, False, 64),
    "16 nodes of 8": (16, 8, False, 96),
}
"""Nodes, devices of each, whether these differ, and blocks of the transformer that is planned."""


def divided(profile: Profile, cluster: Cluster, ordered: bool = False) -> Division | None:
    problem = PlanningProblem(profile, cluster, optimizer=STATE, ordered=ordered)
    found = problem.divider.least(MANY, problem.room(IN_FLIGHT))
    return found[0] if found else None


def seconds_of_plans(quick: bool) -> dict[str, float]:
    """CPU seconds of whole plans on clusters, by their names."""
    found = {}
    for name, (nodes, devices, mixed, blocks) in [*CLUSTERS.items()][: 2 if quick else None]:
        began = time.process_time()
        best_plan(PlanningProblem(transformer(blocks), rack(nodes, devices, mixed), optimizer=OPTIMIZER))
        found[name] = time.process_time() - began
    return found


def gap(problems: int) -> float:
    """By how much T_max is above that of the best of all, at the most, over random problems; a fraction."""
    worst = 0.0
    for seed in range(problems):
        profile, cluster = small(seed)
        found = divided(profile, cluster)
        best = best_of_all(profile, cluster)
        if (found is None) != (best is None):
            return float("inf")
        if found is not None and best:
            worst = max(worst, found.bottleneck / best - 1)
    return worst


def seconds_of_large() -> float:
    """Seconds to divide 1,000 layers among 16 devices of 4 types, on an idle core."""
    profile, cluster = large()
    began = time.process_time()
    assert divided(profile, cluster) is not None
    return time.process_time() - began


def mixes() -> dict[str, dict[str, dict[bool, Estimate | None]]]:
    """By mix, by how layers are divided, and by whether forwards are computed again: what to expect; None: no room."""
    profile = reference_profile.load(DATA / OPT_350M)
    return {name: _mix(profile, devices) for name, devices in MIXES.items()}


def _mix(profile: Profile, devices: Sequence[str]) -> dict[str, dict[bool, Estimate | None]]:
    cluster = Cluster([Node("box", devices, LINK)]).with_memory(profile.memory)
    state = optimizer_state(OPTIMIZER)
    found: dict[str, dict[bool, Estimate | None]] = {
        how: {again: best_in_flight(profile, cluster, splits, state, again) for again in (False, True)}
        for how, splits in by_hand(profile, cluster.slots).items()
    }
    plans = {
        again: best_plan(PlanningProblem(profile, cluster, optimizer=OPTIMIZER, recompute=again))
        for again in (False, True)
    }
    found["planned"] = {again: plan if plan.fits else None for again, plan in plans.items()}
    return found


def emulated() -> dict[str, Task]:
    """Trainings on emulated devices."""
    return {
        f"{name}, Nm = {in_flight}": replace(
            task(where, EMULATED_MS), in_flight=in_flight, warmup=36, steps=72, tail=12, cores=two_cores()
        )
        for name, where in EMULATED.items()
        for in_flight in EMULATED_IN_FLIGHT
    }


def plain() -> Task:
    """The trainings of `emulated` without stages."""
    return replace(next(iter(emulated().values())), variant="plain", pads=(), in_flight=None)


def predicted(each: Task, step: float) -> float:
    """Minibatches per second that the simulator says, where Lightning's step takes ``step`` seconds."""
    assert each.in_flight is not None
    stages = [StageTimes(forward, backward) for forward, backward in each.pads]
    run = simulate(stages, each.in_flight, each.total, step=step)
    first, last = each.warmup, each.warmup + each.steps
    return each.steps / (run.published[last - 1] - run.published[first - 1])


def measure(each: Task) -> Measurement:
    """Trains in a fresh process with one torch thread."""
    return run_alone(Process(WORKER, (each.to_json(),)), TIMEOUT)


def run(options: Options) -> Outcome:
    """Plans, and trains on emulated devices in `options.rounds` interleaved rounds."""
    machine = describe_machine(two_cores())
    tasks = emulated()
    if options.quick:
        tasks = {name: each for name, each in tasks.items() if each.in_flight in (2, 6)}
    variants = {PLAIN: plain(), **tasks}
    rounds, failures = in_rounds({name: partial(measure, each) for name, each in variants.items()}, options.rounds)
    repeats = 1 if options.quick else 5
    absent = missing(OPT_350M, *map(file_of, BEST))
    return report(
        machine,
        gap(QUICK_PROBLEMS if options.quick else PROBLEMS),
        [seconds_of_large() for _ in range(repeats)],
        seconds_of_plans(options.quick),
        {} if absent else {name: busiest(name) for name in BEST},
        {} if absent else mixes(),
        tasks,
        rounds,
        failures,
        absent,
    )


def report(
    machine: Mapping[str, object],
    gap: float,
    seconds: Sequence[float],
    plans: Mapping[str, float],
    graphs: Mapping[str, float],
    mixes: Mapping[str, Mapping[str, Mapping[bool, Estimate | None]]],
    tasks: Mapping[str, Task],
    rounds: Rounds,
    failures: Mapping[str, str],
    absent: str | None = None,
) -> Outcome:
    """Turns what was found into a text to read and data to keep; ``absent`` says why a part is not there."""
    figures = [
        Figure("T_max above the best of all, random problems", _of(gap), target=CLOSE - 1, at_most=True, digits=6),
        Figure("CPU time for 1,000 layers on 16 devices of 4 types", Spread.of(seconds), "s", target=1.0, at_most=True),
        *(
            Figure(f"CPU time of a plan, {name}", _of(took), "s", target=30.0, at_most=True)
            for name, took in plans.items()
        ),
    ]
    for name, best in BEST.items():
        spread = _of(graphs[name] / best) if name in graphs else None
        title = f"{name} on six accelerators, over the reference"
        figures.append(Figure(title, spread, target=1.01, at_most=True, digits=4))
    figures += [_against_hands(name, found) for name, found in mixes.items()]
    figures += [_against_engine(name, each, rounds) for name, each in tasks.items()]
    text = [
        f"{NAME}: our divisions, OPT-350M planned for mixed GPUs ({OPTIMIZER}, {LINK}), and simulated pipelines"
        " beside emulated ones",
        provenance(machine, len(rounds)),
        "",
        *([table(_rows(mixes)), ""] if mixes else []),
        figures_table(figures, "ratio"),
        *([f"\nleft out: {absent}"] if absent else []),
        *(f"\nfailed: {name}\n{reason}" for name, reason in failures.items()),
    ]
    data = {
        "machine": dict(machine),
        "gap": gap,
        "seconds": list(seconds),
        "plans": dict(plans),
        "graphs": dict(graphs),
        "mixes": {
            name: {how: {str(again): _data(each) for again, each in those.items()} for how, those in found.items()}
            for name, found in mixes.items()
        },
        "tasks": {name: asdict(each) for name, each in tasks.items()},
        "predicted": [
            {name: predicted(each, _step(measured)) for name, each in tasks.items()}
            for measured in rounds
            if PLAIN in measured
        ],
        "rounds": [{name: asdict(value) for name, value in measured.items()} for measured in rounds],
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures and absent is None, figures=figures)


def _of(value: float) -> Spread:
    return Spread(value, value, value)


def _against_hands(name: str, found: Mapping[str, Mapping[bool, Estimate | None]]) -> Figure:
    """Our best throughput over the best by hand, each with or without recomputation, whichever is faster."""

    def best(hows: Sequence[str]) -> float:
        return max((each.rate for how in hows for each in found[how].values() if each is not None), default=0.0)

    hands, ours = best([how for how in found if how != "planned"]), best(["planned"])
    return Figure(f"OPT-350M over the best by hand, {name}", _of(ours / hands) if hands else None, target=1.0)


def _against_engine(name: str, each: Task, rounds: Rounds) -> Figure:
    """Difference of the engine from the simulation with the step of the same round, as a fraction of the latter."""
    found = [
        abs(measured[name].rate / predicted(each, _step(measured)) - 1)
        for measured in rounds
        if name in measured and PLAIN in measured
    ]
    spread = Spread.of(found) if found else None
    return Figure(f"engine off the simulation, {name}", spread, target=0.05, at_most=True, digits=3)


def _step(measured: Mapping[str, Measurement]) -> float:
    """Seconds of Lightning's step, as the plain Trainer takes them."""
    return 1 / measured[PLAIN].rate


def _rows(mixes: Mapping[str, Mapping[str, Mapping[bool, Estimate | None]]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("OPT-350M on", "divided", "recompute", "minibatches/s", "Nm", "T_max s", "first layers")
    ]
    for name, found in mixes.items():
        for how, those in found.items():
            for again, each in those.items():
                cells = ("does not fit", "", "", "") if each is None else _cells(each)
                rows.append((name, how, "yes" if again else "no", *cells))
    return rows


def _cells(each: Estimate) -> tuple[str, str, str, str]:
    stages = " ".join(f"{stage.slot.device.name}:{stage.first}" for stage in each.stages)
    return f"{each.rate:.3f}", str(each.in_flight), f"{each.bottleneck:.3f}", stages


def _data(each: Estimate | None) -> dict[str, object] | None:
    if each is None:
        return None
    stages = [(stage.slot.device.name, stage.first, stage.last, stage.memory.total) for stage in each.stages]
    return {"rate": each.rate, "in_flight": each.in_flight, "bottleneck": each.bottleneck, "stages": stages}
