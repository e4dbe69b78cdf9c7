"""Plans of several virtual workers: each has the plan's stages, on its devices, and all train as the laws say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from lightning_hetpipe import Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedStage, PlannedWorker
from tests.support.namespaces import Machine
from tests.wsp.launch import Job, run_all
from tests.wsp.test_exact import check, expected, together
from tests.wsp.test_several_machines import TRUSTED, by_hand, trained
from tests.wsp.test_shares import divided

LAYERS = tuple(f"task.net.{number}" for number in range(7))


def planned(*workers: Sequence[tuple[str, int]], in_flight: int, waves: Sequence[int] = ()) -> Plan:
    """For ``mlp``: of each virtual worker, the node and device of each stage, and its first layer; and W_v."""
    made = []
    for stages, wave in zip_longest(workers, waves):
        ends = [*(first for _, first in stages[1:]), len(LAYERS)]
        parts = []
        for (place, first), after in zip(stages, ends, strict=True):
            node, device = place.split("/")
            parts.append(PlannedStage(node, device, first, after - 1, 0.1, 1, None))
        made.append(PlannedWorker(10.0, tuple(parts), wave))
    return Plan("Evaluated", in_flight, in_flight, 0, 0.1, 10.0 * len(made), tuple(made), LAYERS)


def job(folder: Path, plan: Plan, lengths: Sequence[int], **more: Any) -> Job:
    plan.save(folder / "plan.json")
    return Job(folder, "mlp", lengths, "auto", "auto", {"plan": str(folder / "plan.json"), **more})


def ran(found: list[dict[str, Any]], plan: Plan) -> None:
    """The stages of each virtual worker had the plan's layers."""
    for each, worker in zip(found, plan.virtual_workers, strict=True):
        wanted = [list(LAYERS[stage.first_layer : stage.last_layer + 1]) for stage in worker.stages]
        assert each["stages"] == wanted


def test_each_virtual_worker_has_stages_and_a_share_of_its_own(tmp_path: Path) -> None:
    """One run has data for each virtual worker, and a clock distance of its own in place of the plan's; the other
    divides the same data by the plan's waves."""
    stages = [("box/cpu:2", 0), ("box/cpu:0", 3)], [("box/cpu:1", 0), ("box/cpu:3", 2)]
    equal = replace(planned(*stages, in_flight=2), clock_distance=1, placement="round_robin")
    unequal = planned(*stages, in_flight=2, waves=(2, 5))
    (tmp_path / "equal").mkdir()
    (tmp_path / "unequal").mkdir()
    own = job(tmp_path / "equal", equal, (4, 5), wsp={"clock_distance": 0})
    shared = job(tmp_path / "unequal", unequal, (0, 0), shares=16)
    found = run_all(own, shared)
    ran(found[0], equal)
    ran(found[1], unequal)
    own.in_flight = shared.in_flight = 2
    check(own, found[0], expected(own, 2))
    check(shared, found[1], together(shared, (2, 5), divided("mlp", 16, [(2, 5)] * 2)))


@pytest.mark.slow
def test_virtual_workers_across_nodes_that_are_emulated(tmp_path: Path) -> None:
    """All of them run on this machine."""
    plan = planned([("a/T4:0", 0), ("b/V100-16:0", 4)], [("b/V100-16:1", 0), ("a/T4:1", 1)], in_flight=3)
    here = job(tmp_path, plan, (4, 3), cluster={"a": ["2xT4"], "b": ["2xV100-16"]})
    (found,) = run_all(here)
    ran(found, plan)
    here.in_flight = 3
    check(here, found, expected(here, 3))


@pytest.mark.slow
def test_a_command_on_each_machine_of_the_plan(machines: list[Machine], tmp_path: Path) -> None:
    """The second machine has one virtual worker more than the first."""
    plan = planned(
        [("a/cpu:0", 0), ("a/cpu:1", 2)],
        [("b/cpu:0", 0), ("b/cpu:1", 5)],
        [("b/cpu:2", 0)],
        in_flight=3,
    )
    here = job(tmp_path, plan, (4, 5, 3), trainer={"num_nodes": 2}, wsp=TRUSTED)
    processes = by_hand(machines, here)
    here.in_flight = 3
    trained(here, processes, 3)
    ran(here.written(), plan)
