"""Simulated clusters against real ones: four virtual workers on emulated stages, equal and unequal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median

from benchmarks.cluster_simulation_worker import Task
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
    run_together,
    table,
)
from benchmarks.machine import describe_machine, provenance, two_cores
from benchmarks.transport import measure as measure_transport
from benchmarks.virtual_workers import number
from lightning_hetpipe.planning.allocation.allocator import JITTER
from lightning_hetpipe.planning.model.cluster import Cluster, Device, Link, Node
from lightning_hetpipe.planning.model.cluster_simulation import ClusterSimulation, simulate_cluster
from lightning_hetpipe.planning.model.simulate import PlacedWeights, StageTimes, WorkerPipeline
from lightning_hetpipe.rules.waves import wave_lengths

NAME = "cluster_simulation"
WORKER = "benchmarks.cluster_simulation_worker"
TIMEOUT = 600.0

T_MAX = 0.15
"""Seconds of the longest stage of the fastest virtual worker; long, so that four times four stages fit two cores."""

SPEEDS = (1.0, 0.8, 0.5, 0.3)
"""Speeds of unequal virtual workers, relative to the fastest."""

STAGES = (0.6, 1.0, 0.8, 0.5)
"""Times of unequal virtual workers' stages, relative to the longest; those of equal ones are equal."""

IN_FLIGHT = 6
WARM_UP, TAIL = 6, 1
"""Waves that do not count, at the start and at the end."""

WAVES, FAST_WAVES = 12, 20
"""Waves of unequal and of equal virtual workers; those of the former take three times as long."""

LARGE = 1024
"""Width of a model whose synchronisation takes long."""

SEEDS = 5
"""Simulations of each training, whose tasks differ as in plans, by :data:`JITTER`."""

QUICK = ("equal, D = 0", "unequal, with shares, D = 0")


def pads(t_max: float, stages: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Seconds of stages that take ``stages`` times ``t_max``, a third of it forward."""
    return tuple((t_max * each / 3, t_max * each * 2 / 3) for each in stages)


def tasks(t_max: float = T_MAX) -> dict[str, Task]:
    """All variants, where the longest stage of the fastest virtual worker takes ``t_max`` seconds."""
    same = Task((pads(t_max, [1.0] * len(STAGES)),) * len(SPEEDS), (IN_FLIGHT,) * len(SPEEDS), FAST_WAVES, IN_FLIGHT)
    large = replace(same, width=LARGE, in_flight=4, lengths=(4,) * len(SPEEDS))
    differ = replace(same, pads=tuple(pads(t_max / speed, STAGES) for speed in SPEEDS), waves=WAVES)
    shared = replace(differ, lengths=wave_lengths(SPEEDS, IN_FLIGHT))
    found = {"equal, larger weights, Nm = 4, D = 0": large}
    for distance in (0, 4):
        for name, task in (("equal", same), ("unequal", differ), ("unequal, with shares", shared)):
            found[f"{name}, D = {distance}"] = replace(task, clock_distance=distance)
    return found


@dataclass(frozen=True)
class Costs:
    """Times of this machine that the simulation is given.

    Attributes:
        step: Seconds of Lightning's step: a plain Trainer's minibatch, with next to nothing to compute.
        server: Bytes per second of pushing to and pulling from the server, by one virtual worker at a time.
    """

    step: float
    server: float


@dataclass(frozen=True)
class Seen:
    """Synchronised training, real or simulated, in the waves that count.

    Attributes:
        rate: Minibatches per second of all virtual workers.
        waits: Part of its time for which each one's Lightning thread waited and moved weights.
        staleness: The most minibatches of one virtual worker that another's weights lacked, over all waves.
        late: Seconds by which a forward or backward ended later than it was to, on average; 0 where simulated.
        cores: CPU seconds per second of all virtual workers, without the server; 0 where simulated.
    """

    rate: float
    waits: tuple[float, ...]
    staleness: int
    late: float = 0.0
    cores: float = 0.0


Round = Mapping[str, Costs | Seen]
"""Costs of each width, and a training of each variant."""


def costs(width: int, cores: Sequence[int]) -> Costs:
    """Measure what a model of ``width`` costs on this machine."""
    task = Task((), (8,), 16, width=width, cores=tuple(cores))
    published = run_alone(Process(WORKER, (task.to_json(),)), TIMEOUT).numbers("published")
    steps = [after - before for before, after in pairwise(published)]
    server = measure_transport("whole", 1, task.weights_bytes, 3).rate * 2**30
    return Costs(median(steps), server)


def train(task: Task) -> Seen:
    """Train for real, on emulated stages."""
    (announced,) = run_together([Process(WORKER, (task.to_json(),))], TIMEOUT)
    return seen(task, sorted(announced, key=lambda each: number(each, "vw")))


def seen(task: Task, announced: Sequence[Measurement]) -> Seen:
    """Combine what the virtual workers have announced, in their order."""
    passes = sum(number(each, "passes") for each in announced)
    staleness = max(
        lacking(task, vw, clocks)
        for vw, each in enumerate(announced)
        for clocks in _clocks(task, each.numbers("included"))
    )
    published = [each.numbers("published") for each in announced]
    return replace(
        _in_window(task, published, [each.numbers("waits") for each in announced], staleness),
        late=sum(number(each, "late") for each in announced) / max(passes, 1),
        cores=sum(each.cores for each in announced),
    )


def simulated(task: Task, costs: Costs) -> Seen:
    """Simulate the same training: medians of all seeds."""
    found = [seen_in(task, simulation(task, costs, seed)) for seed in range(SEEDS)]
    waits = tuple(median(own) for own in zip(*(each.waits for each in found), strict=True))
    return Seen(median(each.rate for each in found), waits, max(each.staleness for each in found))


def seen_in(task: Task, found: ClusterSimulation) -> Seen:
    """Measure a simulation as the real training."""
    published, waits = zip(*((each.published, each.synchronised) for each in found.workers), strict=True)
    return _in_window(task, published, waits, found.staleness)


def simulation(task: Task, costs: Costs, seed: int = 0) -> ClusterSimulation:
    """Simulate ``task`` on one node, whose server is as fast as ``costs`` say."""
    node = Node("here", [Device("cpu")], Link(costs.server))
    workers = [
        WorkerPipeline(
            [StageTimes(*pad) for pad in own], wave, costs.step, weights=[PlacedWeights(0, 0, task.weights_bytes)]
        )
        for own, wave in zip(task.pads, task.lengths, strict=True)
    ]
    return simulate_cluster(
        workers,
        task.in_flight,
        task.waves,
        cluster=Cluster([node]),
        servers=[0],
        clock_distance=task.clock_distance,
        jitter=JITTER,
        seed=seed,
    )


def _in_window(
    task: Task, published: Sequence[Sequence[float]], waits: Sequence[Sequence[float]], staleness: int
) -> Seen:
    """Measure what is between the ends of two waves; the last virtual worker to end a wave counts."""
    first, until = WARM_UP, task.waves - TAIL
    spans = [(own[first * wave - 1], own[until * wave - 1]) for own, wave in zip(published, task.lengths, strict=True)]
    began, ended = (max(each) for each in zip(*spans, strict=True))
    shares = [sum(own[first:until]) / (end - begin) for own, (begin, end) in zip(waits, spans, strict=True)]
    return Seen((until - first) * sum(task.lengths) / (ended - began), tuple(shares), staleness)


def lacking(task: Task, vw: int, clocks: Sequence[int]) -> int:
    """The most minibatches of another that weights lack for the last minibatch of ``vw`` that uses them.

    As the simulation counts: virtual worker u has computed ceil((p - 1) W_u / W_v) before minibatch p.

    Args:
        task: The training.
        vw: Virtual worker that has pulled them.
        clocks: Waves of each that they have.
    """
    wave = task.lengths[vw]
    last = min((clocks[vw] + 1) * wave - 1 + task.in_flight, task.waves * wave)
    others = [
        -(-(last - 1) * length // wave) - clock * length
        for other, (clock, length) in enumerate(zip(clocks, task.lengths, strict=True))
        if other != vw
    ]
    return max(others)


def _clocks(task: Task, included: Sequence[float]) -> list[list[int]]:
    """Waves that the weights have at the start, and after each of a virtual worker's synchronisations."""
    size = len(task.lengths)
    found = [[int(each) for each in included[start : start + size]] for start in range(0, len(included), size)]
    return [[0] * size, *found]


def run(options: Options) -> Outcome:
    """Train all variants in `options.rounds` interleaved rounds, and simulate each with the costs of its round."""
    cores = two_cores()
    machine = describe_machine(cores)
    chosen = {name: replace(task, cores=cores) for name, task in tasks().items()}
    if options.quick:
        chosen = {name: chosen[name] for name in QUICK}
    widths = sorted({task.width for task in chosen.values()})
    jobs: dict[str, Callable[[], Costs | Seen]] = {_of_width(width): partial(costs, width, cores) for width in widths}
    jobs |= {name: partial(train, task) for name, task in chosen.items()}
    rounds, failures = in_rounds(jobs, options.rounds)
    return report(machine, chosen, rounds, failures)


def _of_width(width: int) -> str:
    return f"costs of width {width}"


def pairs(task: Task, name: str, rounds: Sequence[Round]) -> list[tuple[Seen, Seen]]:
    """The real and the simulated training of each round that has both."""
    found = []
    for each in rounds:
        real, known = each.get(name), each.get(_of_width(task.width))
        if isinstance(real, Seen) and isinstance(known, Costs):
            found.append((real, simulated(task, known)))
    return found


def report(
    machine: Mapping[str, object], tasks: Mapping[str, Task], rounds: Sequence[Round], failures: Mapping[str, str]
) -> Outcome:
    """Turn the measurements into a text to read and data to keep."""
    both = {name: pairs(task, name, rounds) for name, task in tasks.items()}
    figures = [
        Figure(f"real off the simulation, {name}", _off(found), target=0.05, at_most=True, digits=3)
        for name, found in both.items()
    ]
    text = [
        f"{NAME}: four virtual workers of four emulated stages, real and simulated; the longest stage of the fastest"
        f" takes {1000 * T_MAX:.0f} ms",
        provenance(machine, len(rounds)),
        *(f"{name}: {_told(each)}" for name, each in _all_costs(rounds).items()),
        "",
        table(_rows(both)),
        "",
        figures_table(figures, "difference"),
        *(f"\nfailed: {name}\n{reason}" for name, reason in failures.items()),
    ]
    data = {
        "machine": dict(machine),
        "tasks": {name: asdict(task) for name, task in tasks.items()},
        "rounds": [{name: asdict(value) for name, value in each.items()} for each in rounds],
        "simulated": {name: [asdict(simulated) for _, simulated in found] for name, found in both.items()},
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)


def _off(found: Sequence[tuple[Seen, Seen]]) -> Spread | None:
    """Difference of the real throughput from the simulated one, as a fraction of the latter."""
    return Spread.of(abs(real.rate / simulated.rate - 1) for real, simulated in found) if found else None


def _all_costs(rounds: Sequence[Round]) -> dict[str, Costs]:
    """Costs of each width, of the last round that has them."""
    return {name: each for one in rounds for name, each in one.items() if isinstance(each, Costs)}


def _told(costs: Costs) -> str:
    return f"a step of Lightning {1000 * costs.step:.1f} ms, {costs.server / 1e9:.2f} GB/s to push and to pull"


def _rows(both: Mapping[str, Sequence[tuple[Seen, Seen]]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("virtual workers", "", "minibatches/s", "waits", "staleness", "late ms", "cores busy")
    ]
    for name, found in both.items():
        for title, mine in (("real", 0), ("simulated", 1)):
            those = [each[mine] for each in found]
            if not those:
                rows.append(("" if mine else name, title, "failed", *[""] * 4))
                continue
            rate = Spread.of(each.rate for each in those).median
            waits = " ".join(
                f"{Spread.of(own).median:.2f}" for own in zip(*(each.waits for each in those), strict=True)
            )
            stale = max(each.staleness for each in those)
            late, cores = (Spread.of(getattr(each, what) for each in those).median for what in ("late", "cores"))
            measured = ("", "") if mine else (f"{1000 * late:.1f}", f"{cores:.2f}")
            rows.append(("" if mine else name, title, f"{rate:.2f}", waits, str(stale), *measured))
    return rows
