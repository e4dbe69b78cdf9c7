"""Plans with ``allocation="placed"``: last stages of all virtual workers on one machine, the others at hosts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from lightning_hetpipe import Plan
from lightning_hetpipe.planning.allocation.allocator import Allocator
from lightning_hetpipe.planning.allocation.placed import PlacedPlans, heads
from lightning_hetpipe.planning.model.cluster import Cluster, Node
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.search.problem import PlanningProblem
from tests.hosts.elsewhere import serving
from tests.hosts.test_waves_by_stage import done, environment
from tests.support import forks
from tests.support.namespaces import Unavailable, network
from tests.wsp.launch import ROOT

WIDE = 8192
NAMES = ("store", "attic", "cellar")
CLUSTER = Cluster([Node(name, ["cpu"]) for name in NAMES], "1 Gbit/s")

PROGRAM = """
import json
import sys

import torch
from torch import nn

from lightning_hetpipe import Plan, WSPCallback
from tests.hosts.test_placed import CLUSTER, WIDE
from tests.support.models import ADAMW, CLASSES, Task, vectors
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer

saved, plan, nodes, hosts, batches = sys.argv[1], Plan.load(sys.argv[2]), *map(json.loads, sys.argv[3:])
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, WIDE), nn.Linear(WIDE, CLASSES))
learner = Task(net, ADAMW)
wsp = WSPCallback(security={"insecure": True}, aggregate="mean")
where = {"stage_hosts": hosts} if hosts else {"cluster": CLUSTER} if nodes == 1 else {}
trainer = quiet_trainer(stashing(plan=plan, wsp=wsp, **where), num_nodes=nodes)
trainer.fit(learner, vectors(4 * batches * len(plan.virtual_workers), 4))
if trainer.is_global_zero:
    torch.save(learner.state_dict(), saved)
"""

HEAD = 4 * (16 * WIDE + WIDE + WIDE * 3 + 3)
"""Bytes of the last stage's weights, at the least."""


def made(folder: Path, *, alone: bool) -> Path:
    """A plan whose last two layers are on the first machine, which is a virtual worker ``alone``, too, or not."""
    layers = [LayerBytes(f"net.{n}", 4 if n < 2 else WIDE, 64, 64) for n in range(4)]
    allocator = Allocator(
        PlanningProblem(Profile("Task", 4, layers, {"cpu": [Times(0.01, 0.02)] * 4}, {}), CLUSTER), in_flight=3
    )
    workers = 2 + alone
    (head,) = (each for each in heads(allocator) if each.first == 2 and len(each.grouping) == workers)
    plans = PlacedPlans(allocator, 2)
    found = allocator.allocate("placed", head.grouping, shares=False, placement="local", plans=plans)
    plan = Plan.of(found, "Task", [each.name for each in layers], CLUSTER)
    assert list(plan.problems(CLUSTER)) == []
    assert {worker.stages[-1].place for worker in plan.virtual_workers} == {"cpu:0"}
    assert plan.workers_on_nodes == {"store": workers, "attic": 0, "cellar": 0}
    plan.save(folder / "plan.json")
    return folder / "plan.json"


def program(saved: Path, plan: Path, nodes: int = 1, hosts: str = "{}", batches: int = 30) -> list[object]:
    """Trains on so many ``batches`` for each virtual worker, three to a wave."""
    return [sys.executable, "-c", PROGRAM, saved, plan, nodes, hosts, batches]


def same(one: Path, other: Path) -> bool:
    first, second = torch.load(one), torch.load(other)
    return all(torch.equal(first[name], second[name]) for name in first)


def test_the_bits_are_those_of_stages_in_threads(tmp_path: Path) -> None:
    """The machine of the last stages is a virtual worker of its own, too."""
    plan, known = made(tmp_path, alone=True), {"HETPIPE_TOKEN": "one"}
    here, there = tmp_path / "here.pt", tmp_path / "there.pt"
    with serving(known) as attic, serving(known) as cellar:
        hosts = f'{{"attic": "{attic.address}", "cellar": "{cellar.address}"}}'
        for command in (program(here, plan, batches=12), program(there, plan, hosts=hosts, batches=12)):
            words, own = [*map(str, command[1:])], {**os.environ, "PYTHONPATH": str(ROOT), **known}
            ran = forks.run(*words, environment=own, starting=forks.LAUNCHES)
            assert ran.returncode == 0, ran.stderr
    assert same(here, there)


@pytest.mark.slow
def test_weights_of_last_stages_cross_no_network(tmp_path: Path) -> None:
    """Those of first stages do: one machine's go to the other's server, and come back."""
    plan = made(tmp_path, alone=False)
    here, there = tmp_path / "here.pt", tmp_path / "there.pt"
    try:
        with network(len(NAMES)) as machines:
            store = machines[0]
            done([store.start(program(here, plan), tmp_path, environment())])
            before, command = store.transferred(), program(there, plan, len(machines))
            own = {**environment(), "MASTER_ADDR": store.address, "MASTER_PORT": 29500}
            told = done(
                [each.start(command, tmp_path, {**own, "NODE_RANK": rank}) for rank, each in enumerate(machines)]
            )
            moved = store.transferred() - before
    except Unavailable as why:
        pytest.skip(str(why))
    assert "by way of this process" not in told
    assert same(here, there)
    assert moved < 2 * HEAD, "10 waves of two virtual workers would carry it 40 times"
