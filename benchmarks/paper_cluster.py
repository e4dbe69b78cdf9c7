"""The HetPipe paper's cluster, planned and not run: its allocations, and what weaker GPUs add, beside its figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from hydra.utils import instantiate
from omegaconf import OmegaConf

from benchmarks.all_reduce import AllReduce, all_reduce
from benchmarks.harness import ROOT, Figure, Options, Outcome, Spread, table
from benchmarks.machine import describe_machine, provenance, two_cores
from benchmarks.paper_models import BATCH, MODELS, counted, profile
from lightning_hetpipe.cli.cluster_plans import Compared, compared
from lightning_hetpipe.planning.allocation.allocator import Allocation, Allocator
from lightning_hetpipe.planning.allocation.grouping_search import best_allocation
from lightning_hetpipe.planning.allocation.groupings import equal_distribution
from lightning_hetpipe.planning.model.cluster import Cluster
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.model.stage_memory import optimizer_state
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.rules.waves import PLACEMENTS

NAME = "paper_cluster"
CLUSTER = ROOT / "conf" / "cluster" / "paper.yaml"
OPTIMIZER = "sgd_momentum"

GROWING: Mapping[str, Sequence[str]] = {"4[V]": "v", "8[VR]": "vr", "12[VRQ]": "vrq", "16[VRQG]": "vrqg"}
"""Nodes by the paper's name for them together: weaker GPUs are added."""


@dataclass(frozen=True)
class Reported:
    """Images per second that the paper reports (as recalled), for each of `GROWING`; None: does not fit."""

    horovod: Sequence[float | None]
    hetpipe: Sequence[float]


PAPER: dict[str, Reported] = {
    "VGG-19": Reported((164, 205, 265, 339), (300, 530, 572, 606)),
    "ResNet-152": Reported((233, 353, 415, None), (256, 516, 538, 580)),
}


@dataclass(frozen=True)
class Grown:
    """Plans of some of the nodes.

    Attributes:
        data_parallel: All-reduce data parallel.
        local: ED with parameters beside their stages.
        auto: The best allocation that is found, with shares.
    """

    data_parallel: AllReduce
    local: Allocation
    auto: Allocation


@dataclass(frozen=True)
class Found:
    """Plans of one model.

    Attributes:
        alone: Minibatches per second of the whole model on one GPU, by its name.
        compared: All allocations of the whole cluster.
        grown: Plans of each of `GROWING`.
        seconds: CPU seconds that all of it took.
    """

    alone: Mapping[str, float]
    compared: Sequence[Compared]
    grown: Mapping[str, Grown]
    seconds: float


@cache
def paper_cluster() -> Cluster:
    """The cluster of the configuration, with the catalogue's memory."""
    cluster = instantiate(OmegaConf.load(CLUSTER))
    assert isinstance(cluster, Cluster)
    return cluster.with_memory({})


def planned(model: str) -> Found:
    """Plan ``model`` on the cluster and on its parts."""
    began = time.process_time()
    cluster = paper_cluster()
    own = profile(model, [slot.device.name for slot in cluster.slots])
    alone = {
        slot.device.name: 1 / sum(each.forward + each.backward for each in own.times_on(slot.device))
        for slot in cluster.slots
    }
    allocator = _allocator(own, cluster)
    allocations = []
    for each in compared(allocator, (False, True)):
        allocations.append(each)
        print(f"{NAME}: {model}, {_title(each)}", file=sys.stderr, flush=True)
    grown = {}
    for name, nodes in GROWING.items():
        # The allocator of all nodes knows the plans of their groups.
        part = allocator if len(nodes) == len(cluster.nodes) else _allocator(own, cluster.of_nodes(nodes))
        grown[name] = _grown(part)
        print(f"{NAME}: {model}, {name}", file=sys.stderr, flush=True)
    return Found(alone, allocations, grown, time.process_time() - began)


def _allocator(own: Profile, cluster: Cluster) -> Allocator:
    # One copy of the weights is that of the last synchronisation.
    return Allocator(PlanningProblem(own, cluster, optimizer=optimizer_state(OPTIMIZER) + 1))


def _grown(allocator: Allocator) -> Grown:
    grouping = equal_distribution(allocator.cluster, allocator.speed)
    return Grown(
        all_reduce(allocator.profile, allocator.cluster, OPTIMIZER),
        allocator.allocate("ed", grouping, shares=False, placement="local"),
        best_allocation(allocator, shares=True, placements=PLACEMENTS[::2]),
    )


def run(options: Options) -> Outcome:
    """Plan all models; the first one alone where it is to be quick. Nothing is measured but CPU time."""
    machine = describe_machine(two_cores())
    models = [*MODELS][: 1 if options.quick else None]
    return report(machine, {model: planned(model) for model in models})


def report(machine: Mapping[str, object], found: Mapping[str, Found]) -> Outcome:
    """Turn plans into a text to read and data to keep."""
    text = [
        f"{NAME}: planned and not run, images per second at batch {BATCH}, from data sheets only",
        provenance(machine, 1),
    ]
    figures: list[Figure] = []
    for model, plans in found.items():
        title = f"{model}: {_counts(model)}; one GPU alone, images/s: " + ", ".join(
            f"{name} {rate * BATCH:.0f}" for name, rate in plans.alone.items()
        )
        text += ["", title, "", table(_allocation_rows(plans)), "", table(_grown_rows(model, plans))]
        text += [f"\n{line}" for line in _lacking(plans)]
        text.append(f"\nplanned in {plans.seconds:.0f} s of CPU time")
        figures += [
            Figure(f"{model}, {_title(each)}", _of(rate(each.found)), "images/s", digits=0) for each in plans.compared
        ]
        figures += _over_paper(model, plans)
        figures.append(Figure(f"{model}, CPU time of all plans", _of(plans.seconds), "s", digits=0))
    data = {
        "machine": dict(machine),
        "models": {
            model: {
                "seconds": plans.seconds,
                "allocations": {_title(each): rate(each.found) for each in plans.compared},
                "grown": {
                    name: {
                        "all_reduce": each.data_parallel.rate * BATCH,
                        "lacking": each.data_parallel.lacking,
                        "ed_local": rate(each.local),
                        "auto": rate(each.auto),
                    }
                    for name, each in plans.grown.items()
                },
            }
            for model, plans in found.items()
        },
    }
    return Outcome("\n".join(text), data, complete=True, figures=figures)


def rate(found: Allocation | None) -> float | None:
    """Images per second; None for an allocation that is refused or does not fit."""
    return found.rate * BATCH if found is not None and found.fits else None


def _title(each: Compared) -> str:
    return f"{each.name if each.name == 'auto' else each.title}, {'with' if each.shares else 'without'} shares"


def _counts(model: str) -> str:
    layers = counted(model)
    work = sum(each.forward + each.backward for each in layers)
    weights = sum(each.layer.parameters for each in layers)
    intensity = work / sum(each.moved for each in layers)
    return f"{in_bytes(weights)} of weights, {work / 1e12:.2f} TFLOP per minibatch, {intensity:.0f} FLOP per byte moved"


def _allocation_rows(plans: Found) -> list[tuple[str, ...]]:
    most = BATCH * sum(plans.alone[slot.device.name] for slot in paper_cluster().slots)
    rows: list[tuple[str, ...]] = [
        ("all GPUs", "images/s", "of all GPUs busy", "N", "Nm", "waves", "network/minibatch")
    ]
    for each in plans.compared:
        found, images = each.found, rate(each.found)
        if found is None or images is None:
            rows.append((_title(each), "not possible" if found is None else "does not fit", *[""] * 5))
            continue
        waves = sorted({*found.lengths})
        rows.append(
            (
                _title(each),
                f"{images:.0f}",
                f"{images / most:.2f}",
                str(len(found.grouping)),
                str(found.in_flight),
                str(waves[0]) if len(waves) == 1 else f"{waves[0]} .. {waves[-1]}",
                in_bytes(round(found.network_bytes)),
            )
        )
    return rows


def _grown_rows(model: str, plans: Found) -> list[tuple[str, ...]]:
    header = ("GPUs", "all-reduce", "paper's Horovod", "ratio", "ED local", "paper's HetPipe", "ratio", "auto, shares")
    rows: list[tuple[str, ...]] = [header]
    for (name, each), horovod, hetpipe in zip(
        plans.grown.items(), PAPER[model].horovod, PAPER[model].hetpipe, strict=True
    ):
        summed, local = _summed(each), rate(each.local)
        cells = [_cell(summed), _cell(horovod), _ratio(summed, horovod), _cell(local), _cell(hetpipe)]
        rows.append((name, *cells, _ratio(local, hetpipe), _cell(rate(each.auto))))
    return rows


def _over_paper(model: str, plans: Found) -> list[Figure]:
    """Ratios to the paper's figures, where both fit."""
    figures = []
    rows = zip(plans.grown.items(), PAPER[model].horovod, PAPER[model].hetpipe, strict=True)
    for (name, each), horovod, hetpipe in rows:
        for how, ours, theirs in (
            ("all-reduce over the paper's Horovod", _summed(each), horovod),
            ("ED local over the paper's HetPipe", rate(each.local), hetpipe),
        ):
            if ours is not None and theirs is not None:
                figures.append(Figure(f"{model} on {name}, {how}, planned", _of(ours / theirs)))
    return figures


def _lacking(plans: Found) -> list[str]:
    """A line for each GPU that has no room for the whole model."""
    found = {name: nbytes for each in plans.grown.values() for name, nbytes in each.data_parallel.lacking.items()}
    return [f"all-reduce needs the whole model on {name}, which lacks {in_bytes(n)}" for name, n in found.items()]


def _summed(each: Grown) -> float | None:
    """Images per second of all-reduce data parallel; None where it does not fit."""
    return None if each.data_parallel.lacking else each.data_parallel.rate * BATCH


def _cell(images: float | None) -> str:
    return "does not fit" if images is None else f"{images:.0f}"


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "" if ours is None or theirs is None else f"{ours / theirs:.2f}"


def _of(value: float | None) -> Spread | None:
    return None if value is None else Spread(value, value, value)
