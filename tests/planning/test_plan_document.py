"""Plans: plan.json and back, what is wrong in one and where that is shown, and whether it is for this model."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from lightning_hetpipe import Cluster, Device, Node, Plan
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.plan.planned_worker import PlannedStage, PlannedWorker
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.rules.versions import POLICIES
from tests.planning.drawing import plans
from tests.support.marks import explores

FIRST = PlannedStage("box", "RTX-3090:0", 0, 1, 0.25, 1 << 30, 24 << 30)
SECOND = PlannedStage("box", "T4:1 (estimated)", 2, 2, 0.5, 2 << 30, 16 << 30)
PLAN = Plan("m", 3, 3, 0, 0.5, 2.0, (PlannedWorker(2.0, (FIRST, SECOND)),), ("a", "b", "c"))
BOX = Cluster([Node("box", ["NVIDIA GeForce RTX 3090", "T4"])])


def with_stage(number: int, **changes: Any) -> Plan:
    """``PLAN`` with one stage changed."""
    (worker,) = PLAN.virtual_workers
    stages = [replace(stage, **changes) if n == number else stage for n, stage in enumerate(worker.stages)]
    return replace(PLAN, virtual_workers=(replace(worker, stages=tuple(stages)),))


@explores(40)
@given(plans())
def test_a_round_trip(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder, "plan.json"))
        assert Plan.load(Path(folder, "plan.json")) == plan
    assert list(plan.problems()) == []
    assert plan.differences(plan.layers) is None
    assert str(plan)


def test_stages_that_share_a_device_fit_together() -> None:
    """Each was compared with the whole device."""
    shared = with_stage(1, device="RTX-3090:0", memory_bytes=23 << 30, memory_limit_bytes=24 << 30)
    assert list(shared.problems()) == []
    more = with_stage(1, device="RTX-3090:0", memory_bytes=(23 << 30) + 1, memory_limit_bytes=24 << 30)
    (problem,) = more.problems()
    assert problem.place == "virtual_workers[0].stages[1].memory_bytes"
    assert problem.said.startswith("makes 24.0 GiB with what else lies on RTX-3090:0, 1 byte")
    declared = Cluster([Node("box", [Device("RTX-3090", "23 GiB"), "T4"])])
    (problem,) = shared.problems(declared)
    assert "1.0 GiB more than it has" in problem.said


def test_the_file_has_these_keys(tmp_path: Path) -> None:
    """DESIGN, section 7."""
    PLAN.save(tmp_path / "plan.json")
    value = json.loads((tmp_path / "plan.json").read_text())
    assert list(value) == [
        "schema_version",
        "model",
        "in_flight",
        "wave",
        "clock_distance",
        "bottleneck_s",
        "minibatches_per_second",
        "virtual_workers",
        "layers",
        "recompute",
        "spread",
        "weights",
        "accumulate_grad_batches",
        "allocation",
        "placement",
        "network_bytes",
    ]
    (worker,) = value["virtual_workers"]
    assert list(worker) == ["minibatches_per_second", "stages", "wave"]
    assert worker["stages"][0] == {
        "node": "box",
        "device": "RTX-3090:0",
        "first_layer": 0,
        "last_layer": 1,
        "time_s": 0.25,
        "memory_bytes": 1 << 30,
        "memory_limit_bytes": 24 << 30,
        "weights_bytes": 0,
        "group": [],
        "splits": [],
    }


def test_of_a_choice() -> None:
    layers = [LayerBytes(name, 10, 20, 5) for name in "abcd"]
    profile = Profile("m", 1, layers, {"T4": [Times(1.0, 2.0)] * 4}, {"T4": 10_000})
    cluster = Cluster([Node("n", ["2xT4"])]).with_memory(profile.memory)
    choice = best_plan(PlanningProblem(profile, cluster), 3)
    plan = Plan.of(choice, "m", "abcd", cluster, {"T4"}, clock_distance=1)
    assert (plan.model, plan.in_flight, plan.wave, plan.clock_distance) == ("m", 3, 3, 1)
    assert (plan.bottleneck_s, plan.minibatches_per_second) == (choice.bottleneck, choice.rate)
    (worker,) = plan.virtual_workers
    assert sorted(stage.device for stage in worker.stages) == ["T4:0 (estimated)", "T4:1 (estimated)"]
    assert [(stage.first_layer, stage.last_layer) for stage in worker.stages] == [(0, 1), (2, 3)]
    assert [stage.memory_bytes for stage in worker.stages] == [stage.memory.total for stage in choice.stages]
    assert plan.slots(cluster) == [stage.slot for stage in choice.stages]


def test_a_plan_with_recomputation_says_so(tmp_path: Path) -> None:
    """Nothing in plan.json said so, and a plan that fits with it alone was run without."""
    profile = Profile("m", 1, [LayerBytes(name, 0, 100, 0) for name in "abcd"], {"T4": [Times(1.0, 2.0)] * 4}, {})
    cluster = Cluster([Node("n", [Device("T4", 300), Device("T4", 300)])])
    assert not best_plan(PlanningProblem(profile, cluster), 3).fits
    plan = Plan.of(best_plan(PlanningProblem(profile, cluster, recompute=True), 3), "m", "abcd", cluster)
    assert plan.recompute
    assert "3 minibatches in flight, weights='stash', forwards recomputed, 0." in str(plan)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_plan_says_which_weight_policy_its_figures_are_for(tmp_path: Path) -> None:
    """A run of it predicted weights, whose memory nobody had looked at."""
    profile = Profile("m", 1, [LayerBytes(name, 9, 9, 9) for name in "abcd"], {"T4": [Times(1.0, 2.0)] * 4}, {})
    cluster = Cluster([Node("n", ["2xT4"])])
    choice = best_plan(PlanningProblem(profile, cluster, weights=POLICIES["2bw"], every=4), 3)
    plan = Plan.of(choice, "m", "abcd", cluster)
    assert (plan.weights, plan.accumulate_grad_batches) == ("2bw", 4)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_keys_that_may_be_left_out(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    value = json.loads((tmp_path / "plan.json").read_text())
    for key in ("recompute", "spread", "weights", "accumulate_grad_batches"):
        del value[key]
    (tmp_path / "plan.json").write_text(json.dumps(value))
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert not PLAN.recompute


def test_devices_by_name_and_number() -> None:
    assert (SECOND.device_name, SECOND.device_number, SECOND.place, SECOND.estimated) == ("T4", 1, "T4:1", True)
    assert (FIRST.device_name, FIRST.device_number, FIRST.estimated) == ("RTX-3090", 0, False)
    assert replace(FIRST, device="\n:0").device_name == "\n"  # whatever people call one


def test_the_table() -> None:
    assert str(PLAN).splitlines() == [
        "m: 3 minibatches in flight, weights='stash', ~2 minibatches per second, simulated",
        "",
        "stage  device          layers      ms per minibatch   memory         of",
        "    0  box RTX-3090:0  a – b   ×2             250.0  1.0 GiB   24.0 GiB",
        "    1  box T4:1        c       ×1            ~500.0  2.0 GiB  ~16.0 GiB  bottleneck",
        "",
        "~ is an estimate from data sheets: the layers were not measured on this device",
    ]


def test_stages_on_several_nodes_are_marked() -> None:
    assert "NODE_RANK" not in str(PLAN)
    last = str(with_stage(1, node="other")).splitlines()[-1]
    assert last == (
        "to run it, start the program on each node, with trainer.num_nodes=2, NODE_RANK=0 on other, NODE_RANK=1 on box"
    )


def test_memory_of_a_data_sheet_beside_times_that_were_measured() -> None:
    """The table said that there were no measurements."""
    plan = with_stage(1, device="T4:1 (nominal memory)")
    lines = str(plan).splitlines()
    assert lines[0] == "m: 3 minibatches in flight, weights='stash', 2 minibatches per second, simulated"
    assert lines[4] == "    1  box T4:1        c       ×1             500.0  2.0 GiB  ~16.0 GiB  bottleneck"
    assert lines[5:] == ["", "~ before memory is the data sheet's figure, of which a driver leaves a little less"]
    (_, stage) = plan.virtual_workers[0].stages
    assert (stage.place, stage.device_number, stage.estimated, stage.nominal) == ("T4:1", 1, False, True)


def test_a_declared_limit_is_no_estimate() -> None:
    assert " 15.0 GiB  bottleneck" in str(with_stage(1, memory_limit_bytes=15 << 30))
    assert " no limit  bottleneck" in str(with_stage(1, memory_limit_bytes=None))


def test_several_virtual_workers() -> None:
    (worker,) = PLAN.virtual_workers
    other = replace(worker, stages=(replace(FIRST, device="RTX-3090:2"), replace(SECOND, device="T4:3")))
    lines = str(replace(PLAN, virtual_workers=(worker, other))).splitlines()
    assert lines[0].startswith("m: 2 virtual workers, 3 minibatches in flight")
    assert [line for line in lines if line.startswith("virtual worker")] == [
        "virtual worker 0: 2 minibatches per second, in waves of 3",
        "virtual worker 1: 2 minibatches per second, in waves of 3",
    ]
    assert (
        "N = 2: the sum of their updates acts like 2 times the learning rate; s_global = 4 minibatches at D = 0;"
        " 0 bytes cross the network per minibatch, with placement='size'"
    ) in lines
    shared = replace(PLAN, virtual_workers=(worker, worker))
    with pytest.raises(
        SettingError, match=r"virtual_workers\[1\].stages\[0\].device is 'RTX-3090:0', which is virtual"
    ):
        shared.check()


def test_virtual_workers_may_have_waves_of_their_own(tmp_path: Path) -> None:
    (worker,) = PLAN.virtual_workers
    other = replace(worker, stages=(replace(FIRST, device="RTX-3090:2"), replace(SECOND, device="T4:3")), wave=6)
    plan = replace(PLAN, virtual_workers=(worker, other), allocation="np", placement="local", network_bytes=5 << 20)
    assert plan.waves == (3, 6)
    assert plan.global_staleness == 8, "of the faster one's, DESIGN, section 13"
    said = str(plan)
    assert said.startswith("m: 2 virtual workers by allocation='np', 3 minibatches in flight")
    assert "in waves of 6" in said
    assert "5.0 MiB cross the network per minibatch, with placement='local'" in said
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_files_of_earlier_releases_say_nothing_of_allocations(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    value = json.loads((tmp_path / "plan.json").read_text())
    for key in ("allocation", "placement", "network_bytes"):
        del value[key]
    del value["virtual_workers"][0]["wave"]
    (tmp_path / "plan.json").write_text(json.dumps(value))
    assert Plan.load(tmp_path / "plan.json") == PLAN


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"placement": "near"}, "Plan.placement='near' must be 'size', 'round_robin' or 'local'"),
        ({"weights": "stale"}, "Plan.weights='stale' must be 'stash', "),
        ({"virtual_workers": ()}, "Plan.virtual_workers=() must be a list of at least one virtual worker"),
    ],
)
def test_a_plan_holds_what_its_fields_declare(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=f"^{re.escape(said)}"):
        replace(PLAN, **changes)


def test_the_file_names_where_a_value_stands(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    value = json.loads((tmp_path / "plan.json").read_text())
    value["virtual_workers"][0]["stages"][1]["device"] = "T4"
    (tmp_path / "plan.json").write_text(json.dumps(value))
    said = (
        r"plan.json: virtual_workers\[0\].stages\[1\].device=\"T4\" must be a name and a number, such as 'RTX-3090:0'"
    )
    with pytest.raises(SettingError, match=said):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("number", "changes", "cell", "place", "said"),
    [
        (0, {"memory_bytes": 25 << 30}, "25.0 GiB !", "memory_bytes", "is 25.0 GiB, 1.0 GiB more than RTX-3090:0 has"),
        (0, {"last_layer": 0}, "a       ×1", "first_layer", "is 2 and must be 1: stages leave none out"),
        (1, {"first_layer": 1}, "b – c ! ×2", "first_layer", "is 1 and must be 2: stages leave none out"),
        (1, {"last_layer": 3}, "c !", "last_layer", "is 3 and must be from 2 to 2"),
    ],
)
def test_what_is_wrong_is_marked_in_its_cell_and_refused(
    number: int, changes: dict[str, Any], cell: str, place: str, said: str
) -> None:
    plan = with_stage(number, **changes)
    with pytest.raises(
        SettingError, match=rf"the plan cannot be run: virtual_workers\[0\].stages\[\d\].{place} {said}"
    ):
        plan.check()
    shown = str(plan)
    assert cell.replace(" ", "") in shown.replace(" ", "")
    assert any(line.startswith("! stage") and line.endswith(said) for line in shown.splitlines())


def test_it_is_for_devices_that_are_there() -> None:
    PLAN.check(BOX)
    for other, says in [
        (Cluster([Node("bax", ["RTX-3090", "T4"])]), r"stages\[0\].node is 'box'; there are bax"),
        (Cluster([Node("box", ["RTX-3090"])]), r"stages\[1\].device is 'T4:1 \(estimated\)', and box has 1, from 0 on"),
        (Cluster([Node("box", [Device("T4"), Device("T4")])]), "is 'RTX-3090:0', where box has a T4"),
    ]:
        with pytest.raises(SettingError, match=says):
            PLAN.check(other)
    assert [slot.device.name for slot in PLAN.slots(BOX)] == ["NVIDIA GeForce RTX 3090", "T4"]


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ("abc", None),
        ("abd", "layer 2 is 'c' there and 'd' here (of 3 layers)"),
        ("ab", "it has 3 layers and the model 2; 'c' and what follows is there only"),
        ("abcd", "it has 3 layers and the model 4; 'd' and what follows is here only"),
        ("axcd", "it has 3 layers and the model 4; layer 1 is 'b' there and 'x' here"),
    ],
)
def test_whether_it_is_for_this_model(layers: str, says: str | None) -> None:
    assert PLAN.differences(tuple(layers)) == says


def test_equal_plans_have_one_checksum_however_their_numbers_are_written() -> None:
    """A plan of a file has 2 where the search has 2.0."""
    one, other = (with_stage(0, time_s=seconds) for seconds in (2, 2.0))
    assert one == other
    assert one.fingerprint == other.fingerprint != with_stage(0, time_s=2.5).fingerprint


@pytest.mark.parametrize(
    ("layers", "first"), [(("a", "b", "c"), [0, 2]), (("a", "c"), [0, 1]), (("a", "b"), [0, 2]), (("a",), [0, 2])]
)
def test_stages_of_layers_that_hold_others(layers: tuple[str, ...], first: list[int]) -> None:
    """None is left without a layer."""
    merged = PLAN.merged(layers)
    (worker,) = merged.virtual_workers
    assert [stage.first_layer for stage in worker.stages] == first
    assert (merged == PLAN) is (first[1] == 2)
    assert list(merged.problems()) == []
