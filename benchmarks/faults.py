"""Time that faults cost a run of several virtual workers, and the throughput of those that are left."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.cluster_simulation import pads
from benchmarks.faults_worker import WORKER, Task
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
from benchmarks.virtual_workers import number
from lightning_hetpipe.rules.waves import wave_lengths
from tests.wsp.lost_time import LostTime, decisions_of, lost_time, strikes_of, wave_ends

NAME = "faults"
TIMEOUT = 600.0
T_MAX = 0.04
"""Seconds of the longest stage of the fastest virtual worker."""
SPEEDS = (1.0, 0.8, 0.6, 0.4)
IN_FLIGHT = 4
LEASE = 3.0
WARM_UP = 5
"""Waves at the start that do not count."""
LEAST = 0.95

KINDS = {
    "kill": "a virtual worker is killed, and comes back",
    "stop": "a virtual worker stops until it is left out, and comes back",
    "server": "the server is killed",
}
RANDOM = "faults at random"
LEFT = (
    "D = 0",
    "D = 1",
    "D = 0, unequal ones with shares",
)
"""Runs of four, of which virtual worker 1 is lost for good."""


@dataclass(frozen=True)
class Rest:
    """Minibatches per second around the loss of a virtual worker for good, by the waves that were committed.

    Attributes:
        before: Of each virtual worker.
        lost: The one that is lost.
        waiting: Of all, from its loss until the others go on without it.
        waited: Seconds of that.
        after: Of each that is left, from then on.
        late: Seconds by which a pass of virtual worker 0's stages ended later than it was to, on average.
    """

    before: Mapping[int, float]
    lost: int
    waiting: float
    waited: float
    after: Mapping[int, float]
    late: float = 0.0

    @property
    def ratio(self) -> float:
        """Throughput of those that are left, over the sum of what each of them had before."""
        return sum(self.after.values()) / sum(rate for vw, rate in self.before.items() if vw != self.lost)


Found = Sequence[LostTime] | Rest


def tasks(t_max: float = T_MAX) -> dict[str, Task]:
    """All runs, but for folders and faults."""
    equal = Task(
        pads=(pads(t_max, (1.0, 0.8)),) * 4, lengths=(IN_FLIGHT,) * 4, waves=120, in_flight=IN_FLIGHT, lease=LEASE
    )
    unequal = replace(
        equal,
        pads=tuple(pads(t_max / speed, (1.0, 0.8)) for speed in SPEEDS),
        lengths=wave_lengths(SPEEDS, IN_FLIGHT),
        waves=60,
    )
    three = replace(equal, pads=equal.pads[:3], lengths=equal.lengths[:3], waves=60, epochs=8, restarts=8)
    one, ahead, shared = LEFT
    return {RANDOM: three, one: equal, ahead: replace(equal, clock_distance=1), shared: unequal}


def drawn(task: Task, seed: int) -> list[dict[str, Any]]:
    """A fault in each epoch but the last two, in its first half: each kind as often, in any order.

    Virtual workers take turns, so that each has an epoch to come back in.
    """
    draw = random.Random(seed)
    epochs = range(max(1, task.epochs - 2))
    kinds = [[*KINDS][index % len(KINDS)] for index in epochs]
    draw.shuffle(kinds)
    found = []
    for epoch, what in zip(epochs, kinds, strict=True):
        vw = 0 if what == "server" else 1 + epoch % (len(task.lengths) - 1)
        batches = task.waves * task.lengths[vw]
        found.append(fault(task, what, vw, epoch, draw.randrange(batches // 5, batches // 2)))
    return found


def fault(task: Task, what: str, vw: int, epoch: int, batch: int) -> dict[str, Any]:
    """A fault of ``task``, with its mark."""
    return {"what": what, "vw": vw, "epoch": epoch, "batch": batch, "mark": str(Path(task.folder, f"fault {epoch}"))}


def train(task: Task, faults: Callable[[Task], list[dict[str, Any]]]) -> tuple[Task, Measurement]:
    """Train with faults; gives the task with them."""
    task = replace(task, faults=faults(task))
    # One that does not come back makes the program exit with 1; a failure of the run itself announces nothing.
    return task, run_alone(Process(WORKER, (task.to_json(),), codes=(0, 1)), TIMEOUT)


def at_random(task: Task, seeds: count[int]) -> list[LostTime]:
    """The time that each fault of the next seed cost."""
    with tempfile.TemporaryDirectory() as folder:
        done, _ = train(replace(task, folder=folder), partial(drawn, seed=next(seeds)))
        strikes = strikes_of(done.faults)
        return lost_time(decisions_of(done.log), strikes, len(task.lengths), task.clock_distance)


def one_is_lost(task: Task, vw: int = 1) -> Rest:
    """Throughput before and after the loss of ``vw``, in the middle of the run."""
    with tempfile.TemporaryDirectory() as folder:
        batch = task.waves * task.lengths[vw] * 2 // 5
        done, measured = train(replace(task, folder=folder), lambda task: [fault(task, "kill", vw, 0, batch)])
        (strike,) = strikes_of(done.faults)
        found = rest(task, decisions_of(done.log), vw, strike.time)
        return replace(found, late=number(measured, "late") / max(1.0, number(measured, "passes")))


def rest(task: Task, decisions: Sequence[Mapping[str, Any]], lost: int, struck: float) -> Rest:
    """Throughput around the loss of a virtual worker at the time ``struck``."""
    ends = {vw: wave_ends(decisions, vw) for vw in range(len(task.lengths))}
    left = next(each["time"] for each in decisions if each["decision"] == "MemberLeft" and each["vw"] == lost)

    def rate(vw: int, begin: float, end: float) -> float:
        inside = [each for each in ends[vw] if begin <= each <= end]
        return (len(inside) - 1) * task.lengths[vw] / (inside[-1] - inside[0])

    before = {vw: rate(vw, own[WARM_UP], struck) for vw, own in ends.items()}
    after = {vw: rate(vw, left, own[-2]) for vw, own in ends.items() if vw != lost}  # the last wave may be a short one
    meanwhile = sum(task.lengths[vw] for vw, own in ends.items() for each in own if struck < each < left)
    return Rest(before, lost, meanwhile / (left - struck), left - struck, after)


def run(options: Options) -> Outcome:
    """Train all in `options.rounds` interleaved rounds, each with other faults at random."""
    cores = two_cores()
    machine = describe_machine(cores)
    chosen = {name: replace(task, cores=cores) for name, task in tasks().items()}
    if options.quick:
        chosen = {RANDOM: replace(chosen[RANDOM], waves=50, epochs=5), **{name: chosen[name] for name in LEFT[:1]}}
    jobs: dict[str, Callable[[], Found]] = {name: partial(one_is_lost, task) for name, task in chosen.items()}
    jobs[RANDOM] = partial(at_random, chosen[RANDOM], count(1))
    rounds, failures = in_rounds(jobs, options.rounds)
    return report(machine, rounds, failures)


def report(
    machine: Mapping[str, object], rounds: Sequence[Mapping[str, Found]], failures: Mapping[str, str]
) -> Outcome:
    """Turn what was found into a text to read and data to keep."""
    lost = [each for found in rounds for each in _lost(found.get(RANDOM))]
    rests = {name: [each for found in rounds if isinstance(each := found.get(name), Rest)] for name in LEFT}
    figures = [Figure("time lost per fault", _spread(each.seconds for each in lost), "s", digits=1)]
    figures += [
        Figure(f"time lost: {told}", _spread(each.seconds for each in lost if each.what == what), "s", digits=1)
        for what, told in KINDS.items()
    ]
    ratios = [
        Figure(
            f"throughput of those left after the lease, over their former sum, {name}",
            _spread(each.ratio for each in those),
        )
        for name, those in rests.items()
        if those or name in failures
    ]
    figures += [replace(each, target=LEAST, digits=3) for each in ratios]
    text = [
        f"{NAME}: virtual workers of two emulated stages, the longest of the fastest {1000 * T_MAX:.0f} ms;"
        f" Nm = {IN_FLIGHT}, lease {LEASE:g} s",
        provenance(machine, len(rounds)),
        "",
        table([("fault", "struck", "all waited s", "one missing s", "lost s"), *_kinds(lost)]),
        "",
        table([("minibatches/s", "before", "of those left", "waiting", "for s", "after", "late ms"), *_rests(rests)]),
        "",
        figures_table(figures, "figure"),
        *(f"\nfailed: {name}\n{reason}" for name, reason in failures.items()),
    ]
    data = {
        "machine": dict(machine),
        "rounds": [
            {name: asdict(each) if isinstance(each, Rest) else [asdict(one) for one in each]}
            for found in rounds
            for name, each in found.items()
        ],
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)


def _lost(found: Found | None) -> Sequence[LostTime]:
    return () if found is None or isinstance(found, Rest) else found


def _spread(values: Any) -> Spread | None:
    known = list(values)
    return Spread.of(known) if known else None


def _kinds(lost: Sequence[LostTime]) -> list[tuple[str, ...]]:
    rows = []
    for what, told in KINDS.items():
        those = [each for each in lost if each.what == what]
        columns = [_spread(getattr(each, name) for each in those) for name in ("waited", "missing", "seconds")]
        rows.append((told, str(len(those)), *("?" if each is None else f"{each.median:.1f}" for each in columns)))
    return rows


def _rests(rests: Mapping[str, Sequence[Rest]]) -> list[tuple[str, ...]]:
    rows = []
    for name, those in rests.items():
        if not those:
            continue
        columns = (
            [sum(each.before.values()) for each in those],
            [sum(rate for vw, rate in each.before.items() if vw != each.lost) for each in those],
            [each.waiting for each in those],
            [each.waited for each in those],
            [sum(each.after.values()) for each in those],
            [1000 * each.late for each in those],
        )
        rows.append((name, *(f"{Spread.of(column).median:.1f}" for column in columns)))
    return rows
