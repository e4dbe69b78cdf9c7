"""Groups of devices in plans: plan.json and back, the table, what is wrong in one, and the devices that it means."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_hetpipe import Cluster, Node, Plan
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.plan.planned_worker import PlannedMember, PlannedSplit, PlannedStage, PlannedWorker

GROUP = (PlannedMember("box", "RTX-3090:0", 3.0, 1 << 30, 24 << 30), PlannedMember("box", "T4:1", 1.0))
SPLITS = (PlannedSplit("net.0", (48, 16)), PlannedSplit("net.2", (64, 0)))
SPLIT = PlannedStage("box", "RTX-3090:0", 0, 1, 0.25, 1 << 30, 24 << 30, 0, GROUP, SPLITS)
LAST = PlannedStage("box", "T4:2", 2, 2, 0.5, 2 << 30, 16 << 30)
BOX = Cluster([Node("box", ["NVIDIA GeForce RTX 3090", "T4", "T4"])])


def plan_with(**changes: Any) -> Plan:
    """A plan of two stages, the first one on a group."""
    worker = PlannedWorker(2.0, (replace(SPLIT, **changes), LAST))
    return Plan("m", 3, 3, 0, 0.5, 2.0, (worker,), ("a", "b", "c"))


def test_a_group_in_the_file_and_back(tmp_path: Path) -> None:
    plan = plan_with()
    plan.save(tmp_path / "plan.json")
    stage = json.loads((tmp_path / "plan.json").read_text())["virtual_workers"][0]["stages"][0]
    assert stage["group"] == [
        {"node": "box", "device": "RTX-3090:0", "share": 3.0, "memory_bytes": 1 << 30, "memory_limit_bytes": 24 << 30},
        {"node": "box", "device": "T4:1", "share": 1.0, "memory_bytes": 0, "memory_limit_bytes": None},
    ]
    assert stage["splits"] == [{"layer": "net.0", "counts": [48, 16]}, {"layer": "net.2", "counts": [64, 0]}]
    assert Plan.load(tmp_path / "plan.json") == plan


def test_files_without_groups(tmp_path: Path) -> None:
    plan = plan_with(group=(), splits=())
    plan.save(tmp_path / "plan.json")
    value = json.loads((tmp_path / "plan.json").read_text())
    for stage in value["virtual_workers"][0]["stages"]:
        del stage["group"], stage["splits"]
    (tmp_path / "plan.json").write_text(json.dumps(value))
    assert Plan.load(tmp_path / "plan.json") == plan


def test_the_table_shows_the_members_and_their_shares() -> None:
    assert "box RTX-3090:0 75% + T4:1 25%" in str(plan_with())


@pytest.mark.parametrize(
    ("changes", "place", "said"),
    [
        ({"group": GROUP[:1]}, "group", "has one member; leave it out for a stage on one device"),
        (
            {"group": GROUP[1:] * 2},
            "device",
            "is 'RTX-3090:0', which holds the unsplit weights and must be in the group",
        ),
        ({"group": ()}, "splits", "divides layers, and the stage has no group; give it one, or leave splits out"),
        (
            {"group": tuple(replace(each, share=0.0) for each in GROUP)},
            "group",
            "has no share above 0; give at least one member some of the work",
        ),
        ({"group": (*GROUP, GROUP[1])}, "group[2].device", "is 'T4:1', which is in the group already"),
        (
            {"group": (GROUP[0], replace(GROUP[1], node="other"))},
            "group[1].node",
            "is 'other', and a group lies on one machine, here 'box'",
        ),
        (
            {"group": (GROUP[0], replace(GROUP[1], memory_bytes=3 << 30, memory_limit_bytes=2 << 30))},
            "group[1].memory_bytes",
            "is 3.0 GiB, 1.0 GiB more than T4:1 has",
        ),
        (
            {"splits": (PlannedSplit("net.0", (1, 2, 3)),)},
            "splits[0].counts",
            "has 3 numbers for 'net.0', and the group 2 members",
        ),
        ({"splits": (PlannedSplit("net.0", (0, 0)),)}, "splits[0].counts", "gives nobody anything of 'net.0'"),
        ({"splits": SPLITS[:1] * 2}, "splits[1].layer", "is 'net.0', which is divided already"),
    ],
)
def test_what_is_wrong_in_a_group_is_marked_and_refused(changes: dict[str, Any], place: str, said: str) -> None:
    plan = plan_with(**changes)
    assert (f"virtual_workers[0].stages[0].{place}", said) in [(each.place, each.said) for each in plan.problems()]
    with pytest.raises(SettingError, match=r"the plan cannot be run: virtual_workers\[0\].stages\[0\]"):
        plan.check()
    row = next(line for line in str(plan).splitlines() if line.strip().startswith("0  box"))
    assert "!" in row
    assert f"stage 0: {place.replace('_bytes', '').replace('_', ' ')} {said}" in str(plan)


def test_a_member_belongs_to_one_virtual_worker() -> None:
    plan = plan_with()
    other = PlannedWorker(2.0, (PlannedStage("box", "T4:1", 0, 2, 0.25, 1, None),))
    (problem,) = replace(plan, virtual_workers=(*plan.virtual_workers, other)).problems()
    assert problem.place == "virtual_workers[1].stages[0].device"
    assert "which is virtual worker 0's, too" in problem.said


def test_a_member_has_to_be_there() -> None:
    plan = plan_with()
    plan.check(BOX)
    with pytest.raises(SettingError, match=r"group\[1\].device is 'T4:1', where box has a RTX-3090"):
        plan.check(Cluster([Node("box", ["2xRTX-3090", "T4"])]))
