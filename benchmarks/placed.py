"""Placed layers (arXiv 1901.05803) with the shapes of VGG-19 and AlexNet, on four machines that are network namespaces.

Beside them run plain parameter servers, a virtual worker on each machine; all-reduce is modelled. Everything is a part
of its size: bytes of weights, images and activations, and the cables.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial

from benchmarks.all_reduce import all_reduce
from benchmarks.ed_local import on_each
from benchmarks.harness import Figure, Options, Outcome, ProcessFailed, Spread, in_rounds, run_together, table
from benchmarks.machine import describe_machine, provenance
from benchmarks.paper_models import BATCH, CLASSES, SIZE, profile
from benchmarks.placed_worker import NODES, Task
from lightning_hetpipe.planning.allocation.allocator import Allocation, Allocator
from lightning_hetpipe.planning.allocation.groupings import GROUPINGS
from lightning_hetpipe.planning.allocation.placed import PlacedPlans, heads
from lightning_hetpipe.planning.model.cluster import Cluster, Node
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.search.problem import PlanningProblem
from tests.support.namespaces import Unavailable, network

NAME = "placed"
WORKER = "benchmarks.placed_worker"
TIMEOUT = 900.0
GPU = "RTX-2060"
MODELS = ("VGG-19", "AlexNet")
NP, PLACED, RING = "parameter servers", "placed", "all-reduce, modelled"
SIDE = 4
"""Images are so many times smaller in both directions together, layers narrower, and minibatches smaller."""
SCALE = SIDE**2
"""Ratio of bytes, and of the cables' bandwidth."""
SLOWER = 2
"""Ratio of all times, so that two cores can keep up."""
BANDWIDTH = 1e9
"""Bit/s of the cables at full size."""
EPOCH = 1_281_167
"""Images of ImageNet."""
MOMENTUM = "sgd_momentum"
IN_FLIGHT = 4


@dataclass(frozen=True)
class Found:
    """Measurement of one allocation, at full size."""

    rate: float
    """Minibatches per second of all virtual workers."""
    bytes: float
    """Bytes on the wire of all machines, headers included, for each minibatch."""
    weight: str
    """The sum of all weights at the end, exactly."""


@cache
def shapes(model: str) -> Profile:
    """The model at full size."""
    return profile(model, [GPU])


def first_of_classifier(model: str) -> int:
    """The index of its first layer."""
    return next(index for index, layer in enumerate(shapes(model).layers) if layer.name.startswith("fc"))


def task_of(model: str) -> Task:
    """Plain parameter servers for ``model``, at the small scale."""
    known, first = shapes(model), first_of_classifier(model)
    inputs = known.layers[first - 1].output // (4 * BATCH)
    image, entry = 3 * SIZE**2 // SIDE, inputs // SIDE
    weights = sum(layer.parameters for layer in known.layers[:first]) / (4 * SCALE)
    times = known.times[GPU]
    halves = times[:first], times[first:]
    return Task(
        "np",
        image,
        round(weights / (image + entry)),
        (entry, 4096 // SIDE, 4096 // SIDE, CLASSES // SIDE),
        tuple(SLOWER * sum(each.forward + each.backward for each in half) for half in halves),
        batch=BATCH // SIDE,
        in_flight=IN_FLIGHT,
    )


def measure(task: Task, rate: str | None) -> Found:
    """Trains on four fresh machines.

    Raises:
        ProcessFailed: also if this machine makes no network namespaces.
    """
    try:
        with network(NODES, rate, burst="64kb") as machines:
            task = replace(task, names=[machine.name for machine in machines])
            started = machines[:1] if task.allocation == "one machine" else machines
            told_of = [one for each in run_together(on_each(started, WORKER, task), TIMEOUT) for one in each]
    except Unavailable as why:
        raise ProcessFailed(str(why)) from None
    (weight,) = {str(each.notes["weight"]) for each in told_of}
    nbytes = max(float(str(each.notes["bytes"])) for each in told_of)  # of the one that has counted
    return Found(SLOWER * sum(each.rate for each in told_of), SCALE * nbytes, weight)


@cache
def planned(model: str) -> Mapping[str, Allocation]:
    """Allocations as simulated at full size."""
    cluster = Cluster([Node(f"node{number}", [GPU]) for number in range(NODES)], f"{BANDWIDTH / 1e9:g} Gbit/s")
    own = Allocator(PlanningProblem(shapes(model), cluster, optimizer=MOMENTUM), in_flight=IN_FLIGHT, wave=IN_FLIGHT)
    first = first_of_classifier(model)
    (head,) = (each for each in heads(own) if (each.first, len(each.grouping)) == (first, NODES))
    return {
        NP: own.allocate("np", GROUPINGS["np"](cluster, own.speed), shares=False),
        PLACED: own.allocate(PLACED, head.grouping, shares=False, placement="local", plans=PlacedPlans(own, first)),
    }


def ring(model: str) -> tuple[float, float]:
    """Minibatches per second of all-reduce, and its bytes for each."""
    cluster = Cluster([Node(f"node{number}", [GPU]) for number in range(NODES)], f"{BANDWIDTH / 1e9:g} Gbit/s")
    weights = sum(layer.parameters for layer in shapes(model).layers)
    return all_reduce(shapes(model), cluster, MOMENTUM).rate, 2 * (NODES - 1) / NODES * weights


def run(options: Options) -> Outcome:
    """Measures both allocations of each model in `options.rounds` interleaved rounds."""
    machine = describe_machine(())
    rate = f"{BANDWIDTH / SCALE / SLOWER / 1e3:.0f}kbit"
    jobs: dict[str, Callable[[], Found]] = {}
    for model in MODELS[-1:] if options.quick else MODELS:
        task = task_of(model)
        task = replace(task, steps=8) if options.quick else task
        jobs[_job(model, NP)] = partial(measure, task, rate)
        jobs[_job(model, PLACED)] = partial(measure, replace(task, allocation="placed"), rate)
    rounds, failures = in_rounds(jobs, options.rounds)
    return report(machine, rounds, failures)


def report(
    machine: Mapping[str, object], rounds: Sequence[Mapping[str, Found]], failures: Mapping[str, str]
) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""
    rows: list[Sequence[str]] = [
        ("model", "MB per minibatch", "simulated", "minibatches/s", "simulated", "hours per epoch")
    ]
    for model in MODELS:
        rows.append((model, *[""] * 5))
        rows += [_row(model, name, rounds) for name in (NP, PLACED)]
        speed, nbytes = ring(model)
        rows.append((f"  {RING}", "", f"{nbytes / 1e6:.1f}", "", f"{speed:.2f}", f"{_hours(speed):.1f}"))
    same = all(
        len({each[_job(model, name)].weight for each in rounds for name in (NP, PLACED) if _job(model, name) in each})
        < 2
        for model in MODELS
    )
    text = [
        f"{NAME}: {NODES} nodes of one emulated {GPU} each, minibatches of {BATCH} images, Nm = W = {IN_FLIGHT}, D = 0,"
        f" cables of {BANDWIDTH / 1e9:g} Gbit/s; run with bytes and cables of 1/{SCALE}, {SLOWER} times as slow",
        f"{provenance(machine, len(rounds))}; MB of all machines, sent",
        "",
        table(rows),
        "",
        f"both have the same weights in the end: {'yes' if same else 'NO'}",
    ]
    text += [f"\nfailed: {job}\n{reason}" for job, reason in failures.items()]
    data = {
        "machine": dict(machine),
        "rounds": [{job: asdict(found) for job, found in each.items()} for each in rounds],
        "failures": dict(failures),
    }
    figures = [
        Figure(f"{PLACED} over {NP}, {model}, {what}", over_np(model, rounds, of))
        for model in MODELS
        for what, of in (("minibatches/s", _rate), ("bytes", _bytes))
    ]
    return Outcome("\n".join(text), data, complete=not failures and same, figures=figures)


def over_np(model: str, rounds: Sequence[Mapping[str, Found]], of: Callable[[Found], float]) -> Spread | None:
    """A figure of placed layers over that of parameter servers, formed within each round; None if no round has both."""
    return Spread.of_ratios(rounds, _job(model, PLACED), _job(model, NP), of)


def _rate(found: Found) -> float:
    return found.rate


def _bytes(found: Found) -> float:
    return found.bytes


def _hours(rate: float) -> float:
    return EPOCH / BATCH / rate / 3600


def _job(model: str, name: str) -> str:
    return f"{model}, {name}"


def _row(model: str, name: str, rounds: Sequence[Mapping[str, Found]]) -> Sequence[str]:
    found = [each[job] for each in rounds if (job := _job(model, name)) in each]
    simulated = planned(model)[name]
    nbytes, rate = f"{simulated.network_bytes / 1e6:.1f}", f"{simulated.rate:.2f}"
    if not found:
        return (f"  {name}", "not measured", nbytes, "", rate, "")
    speed = Spread.of(map(_rate, found)).median
    moved = Spread.of(map(_bytes, found)).median
    return (f"  {name}", f"{moved / 1e6:.1f}", nbytes, f"{speed:.2f}", rate, f"{_hours(speed):.1f}")
