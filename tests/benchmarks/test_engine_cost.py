"""The engine's benchmark: that both sides train alike, what the hand-over's parts are, and the report."""

from itertools import islice

import pytest
import torch

from benchmarks import engine_cost_worker
from benchmarks.engine_cost import measure, parts, report, turn
from benchmarks.engine_cost_worker import PARTS, Job, Stamps, bare, hand_over, modules, piped
from benchmarks.harness import Measurement
from tests.conftest import Clock

MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}
SMALL = Job(stages=2, warmup=2, steps=6, slept_steps=6, slept=(0.0, 0.0))


def measured(wall: float, bare: float, resumed: float) -> Measurement:
    slept = dict(zip(PARTS, (resumed, 10.0, 500.0, 20.0), strict=True))
    notes = {"wall_us": wall, "cpu_us": wall, "bare_wall_us": bare, "bare_cpu_us": bare, "busy": slept, "slept": slept}
    return Measurement("2", rate=1.0, cores=1.5, threads=1, loss=None, notes=notes)


def test_both_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline's weights are not the loop's, as they are stale; with few minibatches they are near."""
    nets = []

    def kept(stages: int) -> torch.nn.Sequential:
        nets.append(modules(stages))
        return nets[-1]

    monkeypatch.setattr(engine_cost_worker, "modules", kept)
    for _ in islice(bare(SMALL), 5):
        pass
    assert sum(1 for _ in piped(SMALL, 5)) == 5
    looped, pipelined = (list(net.parameters()) for net in nets)
    for one, other in zip(looped, pipelined, strict=True):
        assert not torch.equal(one, torch.ones(4))
        assert torch.allclose(one, other, atol=1e-5)


def test_parts_of_the_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(engine_cost_worker, "time", clock)
    stamps = Stamps(last=1)
    for minibatch, delay in ((1, 9.0), (2, 1.0), (3, 2.0), (4, 4.0)):
        assert stamps(0, "forward", minibatch) is None
        after = stamps(1, "forward", minibatch)
        assert after is not None
        after()
        clock.now += delay
        loss = stamps(1, "loss", minibatch)
        assert loss is not None
        clock.now += 1
        stamps.user(minibatch)
        clock.now += 5
        loss()
        clock.now += 3
        assert stamps(1, "backward", minibatch) is None
    assert stamps.parts(skip=1) == pytest.approx(dict(zip(PARTS, (2e6, 1e6, 5e6, 3e6), strict=True)))


@pytest.mark.parametrize("slept", [False, True])
def test_the_hand_over_is_seen_in_a_pipeline(slept: bool) -> None:
    found = hand_over(SMALL, slept)
    assert list(found) == list(PARTS)
    assert min(found.values()) > 0


@pytest.mark.slow
def test_a_process_of_its_own() -> None:
    found = measure(SMALL)
    assert found.threads == 1
    assert found.notes["in_flight"] == 4
    assert set(parts(found, "busy")) == set(PARTS)


def test_the_report_subtracts_what_the_modules_cost() -> None:
    rounds = [{"2": measured(200.0, 60.0, 30.0)}, {"2": measured(240.0, 60.0, 50.0)}]
    assert turn(measured(200.0, 60.0, 30.0)) == 60.0
    outcome = report(MACHINE, rounds, {"8": "it broke"})
    figures = {figure.name: figure.cells() for figure in outcome.figures}
    assert figures["engine per minibatch and stage, k = 2, Nm = 4"] == ("160", "140 .. 180", "150", "missed")
    assert figures["hand-over between last stage and user code, both ways, k = 2, Nm = 4"][0] == "70"
    assert figures["engine per minibatch and stage, k = 8, Nm = 10"] == ("?", "", "150", "")
    assert figures["engine's CPU time, k = 2, Nm = 4"][0] == "160"
    assert figures["engine per minibatch and stage on one core, k = 8, Nm = 10"] == ("?", "", "150", "")
    assert "come with each minibatch" not in outcome.text  # as k = 1 and k = 8 are missing
    assert "it broke" in outcome.text
    assert not outcome.complete


def test_one_core_is_a_figure_of_its_own() -> None:
    outcome = report(MACHINE, [{"2": measured(500.0, 60.0, 30.0), "2 on one core": measured(160.0, 60.0, 30.0)}], {})
    figures = {figure.name: figure.cells() for figure in outcome.figures}
    assert figures["engine per minibatch and stage on one core, k = 2, Nm = 4"] == ("100", "100 .. 100", "150", "met")
    assert figures["engine per minibatch and stage, k = 2, Nm = 4"][-1] == "missed"


def test_what_comes_with_a_minibatch_and_what_with_a_stage() -> None:
    """Engine: 600 for k = 1 and 8 x 160 for k = 8, so that seven stages more take 680."""
    outcome = report(MACHINE, [{"1": measured(700.0, 100.0, 1.0), "8": measured(260.0, 100.0, 1.0)}], {})
    assert "about 503 µs come with each minibatch, and 97 µs with each of its stages" in outcome.text
