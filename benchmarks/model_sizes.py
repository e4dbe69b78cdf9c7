"""`python -m benchmarks.model_sizes`: the largest GPTs for which sets of GPUs have room, for the README.

Bytes are those that this package measures of a GPT with one block, on a CPU, where they are the same; a larger model
has its block several times. The largest model that fits is found by asking the planner.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import ROOT, table
from benchmarks.results import README, as_table, replace_block
from lightning_hetpipe.demo.models import GPT
from lightning_hetpipe.planning.model.catalogue import gpus
from lightning_hetpipe.planning.model.cluster import Cluster, Node
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.plan import profile_file
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.rules.versions import SYNC
from lightning_hetpipe.strategy.profiling_strategy import ProfilingStrategy, profile

MEASURED = ROOT / "benchmarks" / "model_sizes.json"
BEGIN, END = "<!-- sizes: python -m benchmarks.model_sizes --write -->", "<!-- end of sizes -->"

WIDTH, HEADS, CONTEXT, VOCABULARY = 2048, 16, 1024, 50257
BLOCK = "net.1."
"""Beginning of the names of the block's layers."""

SETS: Sequence[Sequence[str]] = (
    ("2xRTX-2080-Ti",),
    ("2xRTX-3060",),
    ("RTX-3090", "RTX-2080-Ti"),
    ("4xT4",),
    ("2xRTX-3090", "2xRTX-2080-Ti"),
)

OPTIMIZER = "adamw"

ACCUMULATED = 8
"""Minibatches of an optimizer step where all of a step's minibatches use the same weights."""

Fits = Callable[[Profile, Cluster], bool]


def fits_alone(profile: Profile, cluster: Cluster) -> bool:
    """True where one of the devices has room for the whole model."""
    plans = (
        best_plan(PlanningProblem(profile, cluster, [slot], optimizer=OPTIMIZER, spread=True), 1)
        for slot in cluster.slots
    )
    return any(plan.fits for plan in plans)


def fits_spread(profile: Profile, cluster: Cluster) -> bool:
    """True where the devices together have room for the model, one minibatch at a time."""
    return best_plan(PlanningProblem(profile, cluster, optimizer=OPTIMIZER, spread=True), 1).fits


def fits_pipeline(profile: Profile, cluster: Cluster, **given: Any) -> bool:
    """True where all devices are stages of a pipeline, by default with one minibatch in flight more than stages."""
    stages = len(cluster.slots)
    in_flight = given.pop("in_flight", stages + 1)
    return best_plan(PlanningProblem(profile, cluster, optimizer=OPTIMIZER, stages=stages, **given), in_flight).fits


WAYS: Mapping[str, Fits] = {
    "one of them": fits_alone,
    "`in_flight=1`": fits_spread,
    "pipeline": fits_pipeline,
    "`recompute=True`": partial(fits_pipeline, recompute=True),
    '`weights="sync"`': partial(fits_pipeline, weights=SYNC, every=ACCUMULATED),
}


def box(devices: Sequence[str]) -> Cluster:
    """One node with these ``devices`` of the catalogue, and the memory that it says is of use."""
    return Cluster([Node("box", devices)]).with_memory({})


def measured() -> Profile:
    """Measure a GPT with one block: minutes, and 10 GB of host memory."""
    model = GPT(context=CONTEXT, width=WIDTH, blocks=1, heads=HEADS, dropout=0.0)
    model.net[0].token = nn.Embedding(VOCABULARY, WIDTH)
    model.net[-1] = nn.Linear(WIDTH, VOCABULARY)
    words = torch.zeros(1, CONTEXT, dtype=torch.int64)
    trainer = L.Trainer(
        strategy=ProfilingStrategy(),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    found = profile(trainer, model, train_dataloaders=DataLoader(TensorDataset(words, words))).profile
    return replace(found, memory={})


def of_blocks(one: Profile, blocks: int) -> Profile:
    """Profile with the block's layers ``blocks`` times."""
    own = [index for index, layer in enumerate(one.layers) if layer.name.startswith(BLOCK)]
    order = [*range(own[0]), *own * blocks, *range(own[-1] + 1, len(one.layers))]
    times = {name: [each[index] for index in order] for name, each in one.times.items()}
    return replace(one, layers=[one.layers[index] for index in order], times=times)


def largest(one: Profile, cluster: Cluster, fits: Fits) -> int:
    """Most blocks with which ``one`` fits on ``cluster``; 0 where not even one does."""
    one = one.with_estimates([slot.device for slot in cluster.slots])
    good, bad = 0, 1
    while fits(of_blocks(one, bad), cluster):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(of_blocks(one, middle), cluster) else (good, middle)
    return good


def billions(one: Profile, blocks: int) -> float:
    """Parameters of the model with ``blocks`` blocks, 4 bytes each, in billions."""
    return sum(layer.parameters for layer in of_blocks(one, blocks).layers) / 4e9


def rows(one: Profile, sets: Sequence[Sequence[str]] = SETS) -> list[tuple[str, ...]]:
    """A row for each of ``sets``, with the largest model of each way, in billions of parameters."""
    found: list[tuple[str, ...]] = [("GPUs", *WAYS)]
    for devices in sets:
        cells = []
        for fits in WAYS.values():
            blocks = largest(one, box(devices), fits)
            cells.append(f"{billions(one, blocks):.1f}" if blocks else "–")
        found.append((_called(devices), *cells))
        print(*found[-1], file=sys.stderr, flush=True)
    return found


def _called(devices: Sequence[str]) -> str:
    """Names of ``devices`` with their nominal memory, for people."""
    counts = [each.split("x", 1) if each[0].isdigit() else ("1", each) for each in devices]
    return ", ".join(f"{count} {name.replace('-', ' ')} ({gpus()[name].memory >> 30} GB)" for count, name in counts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, and print or write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_sizes", description=__doc__)
    parser.add_argument("--measure", action="store_true", help=f"measure the block anew, into {MEASURED.name}")
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    given = parser.parse_args(arguments)
    if given.measure:
        profile_file.save(measured(), MEASURED)
    found = rows(profile_file.load(MEASURED))
    print(table(found))
    if given.write:
        replace_block(README, "\n".join([BEGIN, "", *as_table(found), "", END]), BEGIN, END)


if __name__ == "__main__":
    main()
