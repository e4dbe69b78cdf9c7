"""Plans of several virtual workers, as a strategy reads them: on which nodes they run, and which cannot be run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_hetpipe import Cluster, HetPipeStrategy, Node, Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedWorker
from tests.placement.test_plans import planned
from tests.support.small import refused
from tests.support.trainers import quiet_trainer


def of_several(*nodes: str) -> Plan:
    """A virtual worker on each of ``nodes``."""
    stage = planned(0).virtual_workers[0].stages[0]
    workers = [
        PlannedWorker(10.0, (replace(stage, node=node, device=f"cpu:{index}"),)) for index, node in enumerate(nodes)
    ]
    return replace(planned(0), virtual_workers=tuple(workers))


@pytest.mark.parametrize(
    ("plan", "settings", "said"),
    [
        (
            planned(0, 2),
            {"virtual_workers": 2},
            "virtual_workers=2, but the plan for MLP has 1; leave virtual_workers out",
        ),
        (of_several("box", "box"), {"virtual_workers": 3}, "virtual_workers=3, but the plan for MLP has 2; leave"),
        (of_several("a", "b", "b"), {"virtual_workers": 2}, "the plan for MLP has 1, 2 on its nodes; leave"),
        (
            of_several("a", "b"),
            {},
            "the plan has virtual workers on 2 nodes, and num_nodes=1; set Trainer(num_nodes=2)",
        ),
        (
            of_several("a", "b", "a"),
            {},
            "has its virtual workers on a, b, a, in this order; list those of one node one",
        ),
        (
            replace(of_several("a", "a"), spread=True),
            {},
            "the plan for MLP is of a spread run, which has one virtual wor",
        ),
    ],
)
def test_a_plan_of_several_virtual_workers_that_cannot_be_run(plan: Plan, settings: dict[str, Any], said: str) -> None:
    with refused(said):
        quiet_trainer(HetPipeStrategy(plan=plan, **settings))


NODES = Cluster([Node("a", ["2xcpu"]), Node("b", ["2xcpu"])])


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the second of two that torchrun has started, each on a machine of its own."""
    values = {
        "RANK": 1,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "GROUP_RANK": 1,
        "LOCAL_WORLD_SIZE": 1,
        "GROUP_WORLD_SIZE": 2,
    }
    of_all = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "a"}
    for name, value in (values | of_all).items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("torchrun")
def test_emulated_nodes_that_torchrun_has_started_are_those_of_the_plan() -> None:
    """All devices were taken for emulated on one machine, and the plan was said to be for 1 node."""
    strategy = HetPipeStrategy(plan=of_several("a", "b"), cluster=NODES)
    quiet_trainer(strategy)
    assert (strategy.world_size, strategy.global_rank, strategy.node_rank) == (2, 1, 1)


def across() -> Plan:
    """A plan of one virtual worker with stages on two nodes."""
    stages = planned(0, 2).virtual_workers[0].stages
    worker = PlannedWorker(10.0, tuple(replace(stage, node=node) for stage, node in zip(stages, "ab", strict=True)))
    return replace(planned(0, 2), virtual_workers=(worker,))


@pytest.mark.usefixtures("torchrun")
def test_a_process_on_a_node_without_a_last_stage_is_no_virtual_worker() -> None:
    strategy = HetPipeStrategy(plan=across(), cluster=NODES)
    quiet_trainer(strategy)
    assert (strategy.world_size, strategy.is_global_zero, strategy.node_rank) == (1, False, 1)


def test_virtual_workers_across_nodes_need_these_or_hosts() -> None:
    with refused(
        "with Trainer(num_nodes=2) and NODE_RANK=0 on b, NODE_RANK=1 on a",
        "start hetpipe-host on a, and say where, as in stage_hosts={'a': ",
    ):
        quiet_trainer(HetPipeStrategy(plan=across()))
    with refused("is of a spread run, which has no stages for hosts"):
        quiet_trainer(HetPipeStrategy(plan=replace(across(), spread=True, in_flight=1, wave=1)), num_nodes=2)
