"""hetpipe-plan plans all virtual workers of a cluster, by one allocation or by all of them side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_hetpipe import Plan
from lightning_hetpipe.cli import cluster_plans
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.plan.profile_file import save
from tests.cli.test_plan import Run, folder, plan

__all__ = ["folder", "plan"]

MIB = 1 << 20
SMALL = Profile(
    "four",
    4,
    [LayerBytes(f"layer_{n}", 10 * MIB, 40 * MIB, MIB) for n in range(4)],
    {"V100-16": [Times(0.02, 0.04, 0.002)] * 4},
    {},
)
HERE = ("profile=small.json", "optimizer=sgd", "hydra.run.dir=run")


@pytest.fixture(autouse=True)
def profile(folder: Path) -> None:
    save(SMALL, folder / "small.json")


def lab(folder: Path, *nodes: str) -> tuple[str, ...]:
    """Arguments for a cluster of nodes with these devices."""
    (folder / "mine" / "cluster").mkdir(parents=True)
    lines = [f"- {{name: node{index}, devices: [{devices}], link: 12 GB/s}}\n" for index, devices in enumerate(nodes)]
    text = "_target_: lightning_hetpipe.Cluster\nlink: 10 Gbit/s\nnodes:\n" + "".join(lines)
    (folder / "mine" / "cluster" / "lab.yaml").write_text(text)
    return ("--config-dir", "mine", "cluster=lab", *HERE)


def test_the_papers_cluster_has_its_allocations_compared(plan: Run, folder: Path) -> None:
    said, _ = plan("cluster=paper", *HERE)
    rows = [line.split() for line in said.splitlines() if line.startswith(("np ", "hd ", "ed ", "auto "))]
    assert [row[:3] for row in rows[:4]] == [
        ["np", "size", "equal"],
        ["hd", "size", "equal"],
        ["ed", "size", "equal"],
        ["ed", "local", "equal"],
    ]
    assert [row[2] for row in rows] == ["equal"] * 5 + ["auto"] * 5
    rates = [float(row[-1]) for row in rows]
    assert rates[5] > 1.5 * rates[0], "NP's virtual workers are unequal"
    assert rates[4] >= 0.96 * max(rates[:4])
    assert rates[9] >= 0.96 * max(rates[5:9])
    made = Plan.load(folder / "run" / "plan.json")
    assert made.allocation == "auto"
    assert "by allocation='auto'" in said
    assert list(made.problems()) == []
    assert (folder / "run" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_one_allocation_is_planned(plan: Run, folder: Path) -> None:
    cluster = lab(folder, "2xV100-16", "2xRTX-2060")
    said, _ = plan(*cluster, "strategy.allocation=np", "strategy.wsp.placement=local", "strategy.wsp.clock_distance=1")
    made = Plan.load(folder / "run" / "plan.json")
    assert [worker.nodes for worker in made.virtual_workers] == [("node0",), ("node1",)]
    assert (made.allocation, made.placement, made.clock_distance) == ("np", "local", 1)
    assert made.waves[0] > made.waves[1], "shares are by speed"
    assert "s_global = " in said
    plan(*cluster, "strategy.allocation=np", "strategy.wsp.shares=equal")
    assert len({*Plan.load(folder / "run" / "plan.json").waves}) == 1
    assert "virtual worker 1:" in said
    assert "- the times of RTX-2060 are estimated from those of V100-16" in said


def test_what_virtual_workers_keep_of_their_synchronisation_takes_memory(plan: Run, folder: Path) -> None:
    taken = []
    for arguments in ((*HERE, "devices=[V100-16]"), (*lab(folder, "V100-16", "V100-16"), "strategy.allocation=np")):
        plan(*arguments, "strategy.in_flight=2")
        taken.append(Plan.load(folder / "run" / "plan.json").virtual_workers[0].stages[0].memory_bytes)
    assert taken[1] - taken[0] == sum(layer.parameters for layer in SMALL.layers)


def test_layers_are_placed(plan: Run, folder: Path) -> None:
    cluster = lab(folder, *["{name: V100-16, memory: 1 GiB}"] * 3)
    said, _ = plan(*cluster, "strategy.allocation=placed", "strategy.wsp.shares=equal")
    made = Plan.load(folder / "run" / "plan.json")
    assert (made.allocation, made.placement) == ("placed", "local")
    assert {worker.stages[-1].node for worker in made.virtual_workers} == {"node0"}
    assert list(made.problems()) == []
    assert "by allocation='placed'" in said
    assert (folder / "run" / "plan.png").exists()
    said, _ = plan(*cluster)
    rows = [line.split() for line in said.splitlines() if line.startswith("placed ")]
    assert [row[:3] for row in rows] == [["placed", "local", "equal"], ["placed", "local", "auto"]]
    assert float(rows[0][-1]) == pytest.approx(made.minibatches_per_second, rel=0.01)


@pytest.mark.parametrize("request_", ["strategy.virtual_workers=1", "ordered=true"])
def test_one_virtual_worker_over_several_nodes_is_planned_on_request(plan: Run, folder: Path, request_: str) -> None:
    plan(*lab(folder, "V100-16", "V100-16"), request_)
    made = Plan.load(folder / "run" / "plan.json")
    assert (len(made.virtual_workers), made.allocation) == (1, "")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["strategy.allocation=ed"], ["node 'node0' has 2 where 'node1' has 1", "use 'np' or 'auto'"]),
        (["strategy.allocation=hd"], ["node 'node1' has 1, an odd number"]),
        (["strategy.allocation=nb"], ["strategy.allocation=nb must be 'np', 'ed', 'hd', 'placed' or 'auto'"]),
        (["strategy.allocation=np", "ordered=true"], ["ordered=true is for a plan of one virtual worker"]),
        (
            ["strategy.virtual_workers=2"],
            ["strategy.virtual_workers=2: how many there are follows from the allocation"],
        ),
    ],
)
def test_what_makes_no_plan_is_refused(plan: Run, folder: Path, arguments: list[str], fragments: list[str]) -> None:
    _, error = plan(*lab(folder, "2xV100-16", "V100-16"), *arguments, code=2)
    assert all(fragment in error for fragment in fragments), error


def test_what_is_refused_has_its_row(plan: Run, folder: Path) -> None:
    said, _ = plan(*lab(folder, "2xV100-16", "V100-16"))
    assert "not possible" in said
    assert said.count("- allocation='ed' takes one device of every node") == 1


def test_where_nothing_fits_there_is_advice_and_no_plan(plan: Run, folder: Path) -> None:
    cluster = lab(folder, "{name: V100-16, memory: 20 MiB}", "{name: V100-16, memory: 20 MiB}")
    said, _ = plan(*cluster, "strategy.allocation=np", code=1)
    assert "No plan was found that fits into memory" in said
    assert not (folder / "run" / "plan.json").exists()


def test_progress_is_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    cluster_plans._told("planning")
    assert capsys.readouterr().err == ""


def test_unused_devices_of_a_type_have_one_line(plan: Run, folder: Path) -> None:
    slow = "{name: V100-16, speed: 0.001}"
    said, _ = plan(*lab(folder, "2xV100-16", f"{slow}, {slow}", ", ".join([slow] * 9)), "strategy.allocation=auto")
    lines = [line for line in said.splitlines() if "not used" in line]
    assert lines == [
        "- node1 V100-16:0, V100-16:1 are not used: no plan with it is faster",
        "- node2 9 devices V100-16, V100-16:0 and others, are not used: no plan with it is faster",
    ]


@pytest.mark.parametrize(("link", "advised"), [("100 Mbit/s", True), ("10 Gbit/s", False)])
def test_longer_waves_are_advised_where_synchronisation_takes_much(
    plan: Run, folder: Path, link: str, advised: bool
) -> None:
    arguments = ("strategy.allocation=np", f"cluster.link='{link}'")
    said, _ = plan(*lab(folder, "V100-16", "V100-16"), *arguments)
    found = "- without synchronisation it would be 8.33 minibatches per second: a longer strategy.wsp.wave, such as"
    assert (found in said) is advised


def test_a_device_that_nobody_knows_is_no_other_device(plan: Run, folder: Path) -> None:
    """It stood for the only one of the profile, whatever its name."""
    _, error = plan(*lab(folder, "V100-61"), code=2)
    assert "cluster has the device 'V100-61', which is neither in the profile, which has V100-16, nor in the" in error
    assert "did you mean 'V100-16'?" in error
    (folder / "mine" / "cluster" / "fast.yaml").write_text(
        "_target_: lightning_hetpipe.Cluster\nnodes:\n- {name: a, devices: [{name: own, speed: 2.0}]}\n"
    )
    said, _ = plan("--config-dir", "mine", "cluster=fast", *HERE)
    assert "own:0" in said
