"""hetpipe-plan: plans for profiles, devices by name and clusters, and says when nothing fits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
from lightning.pytorch.callbacks import BaseFinetuning
from matplotlib.figure import Figure

from lightning_hetpipe import Cluster, Node, Plan
from lightning_hetpipe.cli import hetpipe_plan
from lightning_hetpipe.cli.hetpipe_plan import main
from lightning_hetpipe.placement import device_placement
from lightning_hetpipe.planning.model.catalogue import fragmented
from lightning_hetpipe.planning.model.profile import LayerBytes, LayerWidths, Profile, Times
from lightning_hetpipe.planning.plan.profile_file import load, save
from lightning_hetpipe.reporting.plots import draw
from tests.support.marks import fewer

MIB = 1 << 20
LAYERS = [LayerBytes(f"layer_{n}", 10 * MIB, 40 * MIB, MIB) for n in range(12)]
PROFILE = Profile(
    "twelve",
    4,
    LAYERS,
    {"RTX-3090": [Times(0.01, 0.02, 0.001)] * 12, "V100-16": [Times(0.02, 0.04, 0.002)] * 12},
    {"RTX-3090": 24 << 30},
)

FEW = replace(PROFILE, layers=LAYERS[:5], times={name: times[:5] for name, times in PROFILE.times.items()})
"""Profile where any plan will do: a search through many layers takes a second."""

Run = Callable[..., tuple[str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: empty but for a profile."""
    save(PROFILE, tmp_path / "p.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def plan(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs hetpipe-plan with these arguments, which ends with ``code``; gives its output and its errors.

    Its pictures are small and empty, as to draw takes most of the time.
    """
    monkeypatch.setattr(hetpipe_plan, "draw", lambda _: Figure((1, 1)))

    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]  # the process's logging stays as it is
        monkeypatch.setattr(sys, "argv", ["hetpipe-plan", *arguments, *quiet])
        if code:
            with pytest.raises(SystemExit) as end:
                main()
            assert end.value.code == code
        else:
            main()
        return capsys.readouterr()

    return run


@pytest.fixture
def drawn(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures show what there is to see."""
    monkeypatch.setattr(hetpipe_plan, "draw", draw)


@pytest.mark.usefixtures("drawn")
def test_devices_by_name(plan: Run, folder: Path) -> None:
    said, _ = plan("profile=p.json", "devices=[RTX-3090,V100-16]", "hydra.run.dir=run")
    assert said.startswith("twelve: ")
    assert "here RTX-3090:0" in said
    assert "here V100-16:1" in said
    made = Plan.load(folder / "run" / "plan.json")
    assert made.layers == tuple(layer.name for layer in LAYERS)
    assert sorted(stage.device_name for stage in made.virtual_workers[0].stages) == ["RTX-3090", "V100-16"]
    limits = {stage.device: stage.memory_limit_bytes for stage in made.virtual_workers[0].stages}
    assert limits == {"RTX-3090:0": 24 << 30, "V100-16:1 (nominal memory)": fragmented((16 << 30) - (1 << 29))}
    assert "not measured" not in said  # which there are; only the memory is the catalogue's
    assert "~14.7 GiB" in said
    assert "- 12 GB/s with 0.01 ms latency is assumed between devices of 'here', as it declares no link" in said
    assert list(made.problems()) == []
    assert (folder / "run" / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert f"plan     {folder / 'run' / 'plan.json'}" in said


def test_a_cluster_of_ours_with_estimates(plan: Run) -> None:
    said, _ = plan("profile=p.json", "cluster=mixed_box", "hydra.run.dir=run")
    assert "box RTX-3090:0" in said
    assert (
        "times of RTX-2080-Ti, Quadro-RTX-4000 are estimated from those of V100-16, by peak FLOP/s and memory bandwidth"
        in said
    )
    assert "~ is an estimate from data sheets: the layers were not measured on this device" in said
    assert "is assumed" not in said


def test_a_cluster_of_a_users(plan: Run, folder: Path) -> None:
    (folder / "mine" / "cluster").mkdir(parents=True)
    (folder / "mine" / "cluster" / "lab.yaml").write_text(
        "_target_: lightning_hetpipe.Cluster\n"
        "link: {bandwidth: 10 Gbit/s, latency: 50 us}\n"
        "nodes:\n"
        "- {name: one, devices: [2xRTX-3090], link: 12 GB/s}\n"
        "- {name: two, devices: [{name: V100-16, memory: 15.5 GiB}]}\n"
    )
    said, _ = plan("--config-dir", "mine", "profile=p.json", "cluster=lab", "hydra.run.dir=run")
    assert "one RTX-3090:0" in said
    made = json.loads((folder / "run" / "plan.json").read_text())
    assert {stage["node"] for stage in made["virtual_workers"][0]["stages"]} <= {"one", "two"}


def test_a_cluster_that_says_no_links(plan: Run, folder: Path) -> None:
    """They were infinitely fast, and stages on several nodes were like any others."""
    (folder / "mine" / "cluster").mkdir(parents=True)
    (folder / "mine" / "cluster" / "lab.yaml").write_text(
        "_target_: lightning_hetpipe.Cluster\n"
        "nodes:\n"
        "- {name: one, devices: [2xRTX-3090]}\n"
        "- {name: two, devices: [RTX-3090]}\n"
    )
    said, _ = plan("--config-dir", "mine", "profile=p.json", "cluster=lab", "hydra.run.dir=run")
    assert "- 12 GB/s with 0.01 ms latency is assumed between devices of 'one', as it declares no link" in said
    assert "- 1.25 GB/s with 0.05 ms latency is assumed between nodes, as the cluster declares no link" in said
    assert "start the program on each node, with trainer.num_nodes=2, NODE_RANK=0 on " in said


def test_a_link_that_was_given_is_not_supposed(plan: Run) -> None:
    for link in ('link="1 GB/s"', "link.bandwidth=1 GB/s"):
        said, _ = plan("profile=p.json", "devices=[2xRTX-3090]", link)
        assert "is assumed" not in said


def test_what_the_strategy_is_to_be_told_holds(plan: Run, folder: Path) -> None:
    plan("profile=p.json", "devices=[2xRTX-3090]", "strategy.in_flight=5", "ordered=true", "hydra.run.dir=run")
    made = Plan.load(folder / "run" / "plan.json")
    assert (made.in_flight, made.wave) == (5, 5)
    assert [stage.device for stage in made.virtual_workers[0].stages] == ["RTX-3090:0", "RTX-3090:1"]


def test_a_model_is_measured_on_this_machine(plan: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: the second plan takes the profile from the cache, and a third one from the file that the first has left."""
    monkeypatch.setenv("HETPIPE_CACHE", str(folder / "cache"))
    small = ["experiment=digits", "model.blocks=1", "model.width=4", "strategy.in_flight=2", "hydra.run.dir=run"]
    said, _ = plan(*small, "devices=[RTX-3090,T4]")
    assert said.startswith("ResNet: 2 minibatches in flight, weights='xpipe', ")
    assert "are estimated from those of cpu, by peak FLOP/s and memory bandwidth (measured on cpu: " in said
    profile = load(folder / "run" / "profile.json")
    assert (profile.samples, list(profile.times)) == (32, ["cpu"])
    assert all(each.forward > 0 and each.backward > 0 for each in profile.times["cpu"])
    assert profile.speeds["cpu"] > 0
    (kept,) = (folder / "cache" / "profiles").iterdir()
    before = kept.stat().st_mtime_ns
    plan(*small, "devices=[T4,RTX-3090]")
    assert [each.stat().st_mtime_ns for each in (folder / "cache" / "profiles").iterdir()] == [before]
    said, _ = plan("profile=run/profile.json", "devices=[cpu]", "hydra.run.dir=again")
    assert "cpu:0" in said


class FreezesBlocks(BaseFinetuning):
    """Freezes all of the demo's ResNet but its last layer; trains it from the second epoch on."""

    frozen: ClassVar[list[int]] = []

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        for block in list(pl_module.get_submodule("net").children())[:-1]:
            self.freeze(block)
        self.frozen.append(sum(not parameter.requires_grad for parameter in pl_module.parameters()))

    def finetune_function(self, *_: Any) -> None: ...


@pytest.mark.parametrize("given", ["+callbacks.later={_target_: %s}", "trainer.callbacks=[{_target_: %s}]"])
def test_weights_that_are_trained_later_are_planned_as_trained(given: str, plan: Run, folder: Path) -> None:
    """Callbacks were left out, so that a plan had no room for what they unfreeze."""
    FreezesBlocks.frozen.clear()
    small = ["experiment=digits", "model.blocks=1", "model.width=4", "devices=[cpu]", "hydra.run.dir=run"]
    plan(*small, given % f"{__name__}.FreezesBlocks")
    profile = load(folder / "run" / "profile.json")
    assert FreezesBlocks.frozen[0] > 0
    assert [layer.frozen for layer in profile.layers] == [0] * len(profile.layers)


def test_links_are_not_free_beside_times_of_a_cpu(plan: Run, folder: Path) -> None:
    """A CPU takes a second where a GPU takes one millisecond; with the CPU's seconds, any link would do."""
    slow = replace(PROFILE, times={"cpu": [Times(1.0, 2.0)] * 12})
    asked = ["devices=[2xRTX-3090]", 'link="10 MB/s"', "hydra.run.dir=run"]
    for speeds, stages, says in [
        (
            {"cpu": 1e10},
            1,
            "from those of cpu, by peak FLOP/s and memory bandwidth (measured on cpu: 0.01 TFLOP/s): rough",
        ),
        ({}, 2, "; cpu stands for the fastest of them: only ratios mean something, and links look too fast\n"),
    ]:
        save(replace(slow, speeds=speeds), folder / "cpu.json")
        said, _ = plan("profile=cpu.json", *asked)
        assert says in said
        assert len(Plan.load(folder / "run" / "plan.json").virtual_workers[0].stages) == stages


WIDE = replace(
    PROFILE,
    layers=[replace(each, parameters=MIB // 8, kept=MIB // 4, output=MIB // 4) for each in FEW.layers],
    times={"RTX-3090": [Times(0.01, 0.02), Times(0.1, 0.2), *[Times(0.01, 0.02)] * 3]},
    widths={1: LayerWidths(1, {"layer_1": 64})},
)
"""One layer takes most of the time."""


@pytest.mark.parametrize("asked", ["split=true", "split=auto", "strategy.split=auto", "strategy.split=true"])
def test_a_plan_joins_devices_where_that_pays(plan: Run, folder: Path, asked: str) -> None:
    save(WIDE, folder / "wide.json")
    plan("profile=wide.json", "devices=[3xRTX-3090]", asked, "hydra.run.dir=run")
    stages = Plan.load(folder / "run" / "plan.json").virtual_workers[0].stages
    (split,) = (split for stage in stages for split in stage.splits)
    assert split.layer == "layer_1"


def test_a_plan_joins_no_devices_where_split_forbids_it(plan: Run, folder: Path) -> None:
    save(WIDE, folder / "wide.json")
    plan("profile=wide.json", "devices=[3xRTX-3090]", "split=false", "strategy.split=auto", "hydra.run.dir=whole")
    assert not any(stage.group for stage in Plan.load(folder / "whole" / "plan.json").virtual_workers[0].stages)


def test_what_split_may_be(plan: Run) -> None:
    devices = ["profile=p.json", "devices=[2xRTX-3090]"]
    for asked, says in [
        (["split=yes"], "split=yes must be true, auto or false: hetpipe-plan chooses the devices and shares"),
        (["strategy.split={0:[2,1]}"], "strategy.split={0: [2, 1]} must be true, auto or false: hetpipe-plan chooses"),
        (["strategy.split=maybe"], "strategy.split=maybe must be true, false, 'auto', or the shares of each stage"),
        (["split=true", "ordered=true"], "ordered=true gives each stage one device, and split=true joins devices"),
        (["split=auto", "strategy.allocation=np"], "split=auto joins devices of one virtual worker, and this plan is"),
    ]:
        _, error = plan(*devices, *asked, code=2)
        assert error.startswith(f"hetpipe-plan: {says}"), error


def test_a_profile_that_has_no_parts_of_layers(plan: Run) -> None:
    said, _ = plan("profile=p.json", "devices=[2xRTX-3090]", "split=true", "hydra.run.dir=run")
    assert "- no devices are joined, as the profile has no times of parts of layers; measure it with split=true" in said


def test_as_many_stages_as_are_asked_for(plan: Run, folder: Path) -> None:
    """More devices are no worse, so that a plan would have more of them."""
    devices = "devices=[3xRTX-3090]"
    for asked, stages in fewer(
        [(["strategy.stages=2"], 2), (["strategy.stages=auto"], 3), ([], 3)], [(["strategy.stages=2"], 2), ([], 3)]
    ):
        said, _ = plan("profile=p.json", devices, "strategy.in_flight=4", *asked, "hydra.run.dir=run")
        assert ("RTX-3090:2 is not used: strategy.stages leaves it out" in said) == (stages == 2)
        assert len(Plan.load(folder / "run" / "plan.json").virtual_workers[0].stages) == stages


def test_without_the_strategys_section(plan: Run, folder: Path) -> None:
    plan("profile=p.json", "devices=[RTX-3090]", "strategy=plain", "hydra.run.dir=run")
    assert (folder / "run" / "plan.json").exists()


def test_devices_may_say_what_is_to_be_said_of_them(plan: Run, folder: Path) -> None:
    devices = "devices=[RTX-3090,{name: RTX-3090, memory: 12 GiB, speed: 0.5}]"
    plan("profile=p.json", devices, "hydra.run.dir=run", "strategy.in_flight=2")
    stages = Plan.load(folder / "run" / "plan.json").virtual_workers[0].stages
    assert {stage.device: stage.memory_limit_bytes for stage in stages} == {
        "RTX-3090:0": 24 << 30,
        "RTX-3090:1": 12 << 30,
    }


def test_nothing_fits(plan: Run, folder: Path) -> None:
    """Exit code 1, the nearest plan with the cells in which it fails, what would help, and no plan.json."""
    save(
        Profile("big", 1, [LayerBytes("a", 20 << 30, 1, 1)] * 2, {"RTX-3090": [Times(1, 1)] * 2}, {}),
        folder / "big.json",
    )
    said, error = plan("profile=big.json", "devices=[RTX-3090]", "hydra.run.dir=run", code=1)
    assert " GiB !" in said
    assert "! stage 0: memory is" in said
    assert "No plan was found that fits into memory; this one lacks the least." in said
    assert error == ""
    assert not (folder / "run" / "plan.json").exists()


def test_one_minibatch_in_flight_is_a_spread_run(plan: Run, folder: Path) -> None:
    """A pipeline of one minibatch would take another copy of the weights, and more gradients."""
    given = ["profile=p.json", "devices=[{name:RTX-3090,memory:550MiB},{name:RTX-3090,memory:550MiB}]"]
    said, _ = plan(*given, "strategy.in_flight=1", "hydra.run.dir=run")
    assert said.startswith("twelve: a spread run, 1 minibatch in flight, ")
    assert "bottleneck" not in said
    assert "- devices compute one after another, 360 ms for each minibatch, as one is in flight" in said
    found = Plan.load(folder / "run" / "plan.json")
    assert found.spread
    assert [stage.weights_bytes for stage in found.virtual_workers[0].stages] == [60 * MIB] * 2
    for pipeline in ("compile", "recompute"):
        said, _ = plan(*given, "strategy.in_flight=1", f"strategy.{pipeline}=true", code=1)
        assert said.startswith("twelve: 1 minibatch in flight, ")
    said, _ = plan(*given, "strategy.in_flight=2", code=1)
    assert "- strategy.in_flight=1\n" in said


def test_weight_policies_side_by_side(plan: Run) -> None:
    """Each that suits the optimizer has a plan of its own; no table where all are the same."""
    given = ["profile=p.json", "devices=[2xRTX-3090]", "optimizer=sgd_momentum"]
    said, _ = plan(*given, "trainer.accumulate_grad_batches=4", "strategy.weights=sync")
    (header, *rows) = [line.split() for line in said.split("\nweights ")[1].split("\n\n")[0].splitlines()]
    assert header[:2] == ["in", "flight"]
    assert [row[0] for row in rows] == ["stash", "sync", "2bw", "spectrain", "pipeoptim"]
    steps = {row[0]: " ".join(row[5:]) for row in rows}
    assert steps == {"stash": "1", "sync": "0", "2bw": "1", "spectrain": "1, predicted", "pipeoptim": "1, predicted"}
    rates = {row[0]: float(row[2]) for row in rows}
    assert f"weights='sync', {rates['sync']:.3g} minibatches per second" in said
    assert rates["sync"] < rates["2bw"] == rates["stash"] == rates["spectrain"]
    for alone in (["strategy.in_flight=1"], ["devices=[RTX-3090]"]):
        said, _ = plan(*given, *alone)
        assert "\nweights " not in said


def test_a_policy_that_does_not_fit_or_lacks_minibatches_to_a_step(plan: Run, folder: Path) -> None:
    given = ["profile=p.json", "devices=[2xRTX-3090]", "strategy.in_flight=4"]
    _, error = plan(*given, "strategy.weights=2bw", code=2)
    assert "strategy.weights=2bw needs 4 minibatches in one optimizer step where 4 are in flight" in error
    said, _ = plan(*given, "devices=[{name:RTX-3090,memory:700MiB},{name:RTX-3090,memory:700MiB}]", code=1)
    assert re.search(r"^stash  +4  +does not fit ", said, re.M)
    assert re.search(r"^sync  +4  +\d", said, re.M)
    assert re.search(r"^2bw  +needs trainer.accumulate_grad_batches=4$", said, re.M)


@pytest.mark.usefixtures("drawn")
def test_without_matplotlib_there_is_a_plan_and_no_picture(
    plan: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said, _ = plan("profile=p.json", "devices=[RTX-3090]", "hydra.run.dir=run")
    assert "picture  none: drawing a picture needs matplotlib" in said
    assert (folder / "run" / "plan.json").exists()


def test_a_profile_without_this_machines_devices(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_placement, "discovered_cluster", lambda: Cluster([Node("here", ["cpu"])]))
    _, error = plan("profile=p.json", code=2)
    assert error.startswith("hetpipe-plan: profile=p.json has no times of this machine's 'cpu', but of RTX-3090, V100-")
    assert "devices=[RTX-3090,T4], or cluster=mixed_box." in error


def test_what_compiling_brings_is_not_in_a_plan(plan: Run) -> None:
    said, _ = plan("profile=p.json", "devices=[RTX-3090]", "strategy.compile=true")
    assert "- strategy.compile is not in these times" in said


def test_a_wrong_key_in_a_cluster(plan: Run, folder: Path) -> None:
    (folder / "mine" / "cluster").mkdir(parents=True)
    for text, says in [
        (
            "nodes: [{name: a, devices: [{name: T4, memry: 3}]}]",
            "cluster.nodes[0].devices[0].memry is not a setting; did you mean cluster.nodes[0].devices[0].memory?",
        ),
        (
            "nodes: [{name: a, devices: [{name: T4, memory: 3 gigs}]}]",
            "cluster.nodes[0].devices[0].memory='3 gigs' has the unit 'gigs'",
        ),
        (
            "nodes: [{name: a, devices: [T4], link: 3 GBps}]",
            "cluster.nodes[0].link='3 GBps' has the unit",
        ),
        (
            "nodes: [{name: a, devices: [T4]}]\nlink: 3",
            "cluster.link=3 must be a Link, or a bandwidth such as '12 GB/s', or null",
        ),
        (
            "nodes: [{name: a, devices: [T5]}]",
            "the profile of twelve has no times of 'T5'; it has those of RTX-3090, V10",
        ),
        ("_target_: null", "cluster has no _target_; give cluster._target_=lightning_hetpipe.Cluster."),
        ("nodez: []", "cluster.nodez is not a setting; did you mean cluster.nodes?"),
    ]:
        (folder / "mine" / "cluster" / "lab.yaml").write_text(
            text if "_target_" in text else f"_target_: lightning_hetpipe.Cluster\n{text}\n"
        )
        _, error = plan("--config-dir", "mine", "profile=p.json", "cluster=lab", code=2)
        assert error.startswith(f"hetpipe-plan: {says}")


def test_help(plan: Run) -> None:
    with pytest.raises(SystemExit, match="0"):
        plan("--help")


@pytest.mark.slow
def test_it_runs_as_a_module(folder: Path) -> None:
    command = [sys.executable, "-m", "lightning_hetpipe.cli.hetpipe_plan", "profile=p.json", "devices=[RTX-3090]"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert "twelve: " in run.stdout
