"""The ``split`` setting, plans with groups, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetpipe import Cluster, Device, HetPipeStrategy, Node, Plan
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.placement import measuring
from lightning_hetpipe.planning.plan.planned_worker import PlannedMember, PlannedSplit, PlannedStage, PlannedWorker
from tests.exact.pipelines import Pinned
from tests.exact.running import fit
from tests.split.longest_layer import with_longest
from tests.split.test_fits import colours, image_task
from tests.support.models import Task, images, resnet, vectors

LAYERS = tuple(f"net.{number}" for number in range(12))


def plan(splits: Mapping[str, tuple[int, ...]], **changes: Any) -> Plan:
    """The net of ``image_task`` in two stages, the first on a group of two whose second member has the weights."""
    group = (PlannedMember("box", "cpu:0", 1.0), PlannedMember("box", "cpu:1", 2.0))
    divided = tuple(PlannedSplit(layer, counts) for layer, counts in splits.items())
    first = PlannedStage("box", "cpu:1", 0, 6, 0.1, 1, None, 0, group, divided)
    stages = (replace(first, **changes), PlannedStage("box", "cpu:2", 7, 11, 0.1, 1, None))
    return Plan("Task", 2, 2, 0, 0.1, 1.0, (PlannedWorker(1.0, stages),), LAYERS)


def test_a_plan_with_a_group_is_followed() -> None:
    """By its counts, or by shares where it has none."""
    whole = fit(image_task(), colours(16, 4), strategy=Pinned([0, 7], 2))
    for splits in ({}, {"net.4": (5, 7)}, {"net.0": (8, 0), "net.4": (1, 11)}):
        strategy = HetPipeStrategy(plan=plan(splits), weights="stash")
        record = fit(image_task(), colours(16, 4), strategy=strategy)
        assert [stage.device for stage in strategy.last_run.stages] == ["cpu + cpu", "cpu"]
        for one, other in zip(whole.outputs, record.outputs, strict=True):
            torch.testing.assert_close(one["loss"], other["loss"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("splits", "says"),
    [
        (
            {"net.5": (5, 7)},
            "the plan's splits name 'net.5', which is no layer of its stage that can be divided; did you mean",
        ),
        ({"head": (5, 7)}, "the plan's splits name 'head', which is no layer of its stage .*; those are net.0, net.4"),
        ({"net.8": (8, 8)}, "the plan's splits name 'net.8', which is no layer of its stage"),
        (
            {"net.4": (5, 6)},
            r"the plan's split of 'net.4' gives its members 11 units \(5, 6\), and it is divided in 12",
        ),
    ],
)
def test_counts_that_fit_no_layer(splits: dict[str, tuple[int, ...]], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        fit(image_task(), colours(16, 4), strategy=HetPipeStrategy(plan=plan(splits), weights="stash"))


def test_stages_are_as_many_as_are_named() -> None:
    assert HetPipeStrategy(split={"1": [1, 2]}).stages == 2  # as in configurations
    assert HetPipeStrategy(split={0: (1, 2)}, stages=3).stages == 3
    assert HetPipeStrategy(split={0: (1, 2)}).split == {0: (1.0, 2.0)}


@pytest.mark.parametrize("value", ["auto", True])
def test_a_planner_that_chooses_needs_no_plan(value: Any) -> None:
    assert HetPipeStrategy(split=value).split == "auto"


BOX = Cluster([Node("box", [Device("gpu", speed=speed) for speed in (4.0, 2.0, 1.0)], "100 GB/s")])


def test_shares_of_declared_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stages take them in order; split points and times follow from what each device has to do."""
    monkeypatch.setattr(measuring, "profiled", with_longest(measuring.profiled, ["net.4"]))
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    strategy = HetPipeStrategy(cluster=BOX, split={0: [2, 1]}, in_flight=2, weights="stash")
    assert strategy.stages == 1
    found = fit(image_task(), colours(16, 4), strategy=strategy)
    whole = fit(image_task(), colours(16, 4), strategy=Pinned([0], 2))
    (stage,) = strategy.last_run.stages
    assert (stage.device, strategy.last_run.emulated) == ("cpu + cpu", True)
    for one, other in zip(whole.outputs, found.outputs, strict=True):
        torch.testing.assert_close(one["loss"], other["loss"], rtol=1e-4, atol=1e-5)
    strategy = HetPipeStrategy(cluster=BOX, split={1: [2, 1]}, in_flight=2, weights="stash")
    found = fit(image_task(), colours(16, 4), strategy=strategy)
    assert [stage.device for stage in strategy.last_run.stages] == ["gpu:0 (emulated)", "cpu + cpu"]


@pytest.mark.parametrize(
    ("cluster", "split", "says"),
    [
        (BOX, {0: [1, 1], 1: [1, 1]}, "split asks for 4 devices for 2 stages, and there are 3"),
        (
            Cluster([Node("a", ["cpu"]), Node("b", ["2xcpu"])]),
            {0: [1, 1]},
            r"split\[0\] takes devices of a and b, in the order of the cluster, and a group lies on one machine",
        ),
    ],
)
def test_shares_that_declared_devices_cannot_have(cluster: Cluster, split: Any, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        fit(image_task(), colours(16, 4), strategy=HetPipeStrategy(cluster=cluster, split=split, in_flight=2))


def test_shares_for_which_a_declared_device_is_too_small() -> None:
    task = Task(nn.Sequential(nn.Linear(6, 4096), nn.Tanh(), nn.Linear(4096, 64)))
    cluster = Cluster([Node("box", [Device("gpu", "64 MiB"), Device("gpu", "1 MiB", speed=0.5)])])
    with pytest.raises(SettingError, match=r"gpu:1 lacks .* it would fit with other shares in split"):
        fit(task, vectors(8, 4), strategy=HetPipeStrategy(cluster=cluster, split={0: [1, 1]}, in_flight=2))


def test_a_stage_that_there_is_not() -> None:
    with pytest.raises(SettingError, match="split has shares for stage 2, and there are 2 stages"):
        fit(image_task(), colours(16, 4), strategy=Pinned([0, 4], 2, split={2: [1, 1]}))


def test_a_stage_without_anything_to_divide() -> None:
    torch.manual_seed(1)
    task = Task(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 5)))
    with pytest.raises(SettingError, match=r"stage 1 has several devices .* none of its layers can be divided"):
        fit(task, vectors(8, 4), strategy=Pinned([0, 2, 3], 2, split={1: [1, 1]}))


def test_one_layer_of_torchs_own_is_left_whole() -> None:
    """It has no graph; others of its stage are divided."""
    task = resnet()
    fit(task, images(8, 4), strategy=Pinned([0], 2, split={0: [1, 1]}))


def test_an_emulated_group_takes_the_time_that_is_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One device of it was emulated, which had all of the work."""
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    cluster = Cluster([Node("box", [Device("cpu", speed=4.0), Device("cpu", speed=2.0), Device("cpu")])])
    strategy = HetPipeStrategy(plan=plan({}, time_s=0.005), cluster=cluster, weights="stash")
    fit(image_task(), colours(16, 4), strategy=strategy, max_epochs=1)
    grouped, alone = (strategy._devices.emulation.pad(stage) for stage in (0, 1))
    assert grouped is not None
    assert alone is not None
    factor = (grouped.forward + grouped.backward) / 0.005
    assert factor >= 1.0
    assert strategy.last_run.emulated
    assert strategy.last_run.stages[0].time_s == pytest.approx(0.005 * factor)
