"""The benchmark of split layers: its plans, its emulated devices, and its figures."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness import Measurement, Process, run_alone
from benchmarks.split_layers import (
    ALONE,
    EVEN,
    ONE,
    STAGES,
    TWO,
    UNEVEN,
    divided_evenly,
    figures_of,
    plans_of,
    report,
)
from benchmarks.split_layers_worker import WORKER, SlowedDevices, Task
from lightning_hetpipe.planning.model.cluster import Cluster, Node
from lightning_hetpipe.planning.model.profile import LayerBytes, LayerWidths, Profile, Times

MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}


def profile(wide: float, narrow: float) -> Profile:
    """A layer that can be divided, and one that cannot."""
    layers = [LayerBytes("net.0", 1000, 1000, 1000), LayerBytes("net.1", 10, 10, 10)]
    times = {"cpu": [Times(wide / 3, 2 * wide / 3), Times(narrow / 3, 2 * narrow / 3)]}
    return Profile("Images", 1, layers, times, {}, widths={0: LayerWidths(0, {"net.0": 64})})


def test_the_plans_are_of_the_same_devices() -> None:
    found = plans_of("vgg", profile(0.1, 0.001))
    assert found.joined
    stages = {name: plan.virtual_workers[0].stages for name, plan in found.plans.items()}
    assert [stage.place for stage in stages[ALONE]] == ["cpu:2"]
    assert len(stages[STAGES]) > 1 or stages[STAGES][0].place == "cpu:2"
    assert sorted(member.place for member in stages[UNEVEN][0].group) == ["cpu:0", "cpu:1", "cpu:2"]
    assert [member.share for member in stages[EVEN][0].group] == [1.0] * 3
    box = Cluster([Node("box", ["cpu", "cpu", "cpu"])])
    assert not [*divided_evenly(found.plans[ALONE], box).problems()]
    assert not plans_of("narrow", profile(1e-6, 1e-6)).joined


def test_a_device_takes_a_multiple_of_the_cpu_time_of_what_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], list[float]()
    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    monkeypatch.setattr(time, "sleep", slept.append)
    slowed = SlowedDevices({"cpu:0": 2.0, "cpu:1": 4.0}, ["cpu:0"])

    def job() -> str:
        now[0] += 3.0
        return "done"

    end = slowed(0, "forward", 1)
    now[0] += 1.0
    assert slowed._job(4.0, job) == "done"
    now[0] += 0.5
    end()
    assert slept == [9.0, 1.5]


def measured(rate: float) -> Measurement:
    return Measurement("", rate, 1.0, 1, None)


def test_figures_are_ratios_within_a_round() -> None:
    rates = {
        ("vgg", ALONE): 4.0,
        ("vgg", STAGES): 5.0,
        ("vgg", EVEN): 3.0,
        ("vgg", UNEVEN): 6.0,
        ("wide", ONE): 2.0,
        ("wide", TWO): 3.5,
    }
    rounds = [{key: measured(rate) for key, rate in rates.items()}]
    figures = figures_of(rounds, {"narrow": False})  # type: ignore[arg-type]
    assert [None if each.spread is None else round(each.spread.median, 3) for each in figures] == [
        0.857,
        1.2,
        2.0,
        1.75,
        None,
        None,
        0.0,
    ]
    outcome = report(MACHINE, rounds, {"vgg": True, "narrow": False}, {"narrow: unsplit": "why"})  # type: ignore[arg-type]
    assert "split by speed" in outcome.text
    assert not outcome.complete


@pytest.mark.slow
def test_a_plan_is_trained_on_slowed_devices(tmp_path: Path) -> None:
    task = Task("vgg", str(tmp_path), batch=2, warmup=2, steps=3, tail=2)
    run_alone(Process(WORKER, (task.to_json(),)), 300)
    found = plans_of("vgg", profile(0.1, 0.001))
    even = found.plans[EVEN]
    names = tuple(f"net.{n}" for n in range(12))
    stage = replace(even.virtual_workers[0].stages[0], last_layer=11)
    worker = replace(even.virtual_workers[0], stages=(stage,))
    replace(even, layers=names, virtual_workers=(worker,)).save(tmp_path / "even.json")
    factors = {f"cpu:{number}": 2.0 for number in range(3)}
    assert run_alone(Process(WORKER, (replace(task, plan="even.json", factors=factors).to_json(),)), 300).rate > 0
