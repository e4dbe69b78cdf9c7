"""Fits whose stages are at hosts have the oracle's bits."""

from __future__ import annotations

import pytest

from lightning_hetpipe.hosts import orders
from lightning_hetpipe.hosts.remote_stage import RemoteStage
from lightning_hetpipe.hosts.stages_apart import StagesApart
from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.exact.test_captured import CASES, made
from tests.hosts.host_threads import HostThread
from tests.support.marks import slow_except
from tests.support.models import ADAMW, Learner

ROWS = [(name, in_flight, stages) for name in CASES for in_flight, stages in ((2, 2), (3, 3), (4, 4))]
QUICK = [("views", 3, 3), ("resnet", 2, 2), ("dropout", 4, 4), ("translator", 2, 2)]


@pytest.mark.parametrize(("name", "in_flight", "stages"), slow_except(ROWS, *QUICK))
def test_models(name: str, in_flight: int, stages: int, host_threads: list[HostThread]) -> None:
    """Among them buffers, dropout, tied weights, several pieces and inputs, and modules that are called again."""
    _, loader, layers = CASES[name]
    expected = expect(made(name), loader, in_flight, draws=name == "noise between")
    strategy = even(layers, min(stages, layers), in_flight, stage_hosts="processes")
    assert_equal(expected, fit(made(name), loader, strategy=strategy))
    assert len(host_threads) == min(stages, layers) - 1


def test_a_step_asks_nothing_of_hosts(host_threads: list[HostThread], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and buffers are there as soon as a minibatch is: a question would wait for a host that computes.

    Before the first one it is asked whether it is ready, once.
    """
    asked: list[object] = []
    monkeypatch.setattr(RemoteStage, "_ask", lambda self, message: asked.append(message))
    _, loader, layers = CASES["resnet"]
    expected = expect(made("resnet"), loader, 3)
    strategy = even(layers, 3, 3, stage_hosts="processes")
    assert_equal(expected, fit(made("resnet"), loader, strategy=strategy))
    assert host_threads
    assert asked == [orders.Bring(())] * len(host_threads)


@pytest.mark.parametrize(("name", "in_flight", "stages"), slow_except(ROWS, *QUICK))
@pytest.mark.parametrize("joined", [False, True])
def test_stages_that_hosts_own(
    name: str,
    in_flight: int,
    stages: int,
    joined: bool,
    host_threads: list[HostThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights, gradients and optimizer states are at hosts, as they are for stages on other machines; where they are
    joined, activations go from host to host."""
    monkeypatch.setattr("lightning_hetpipe.hosts.stages_apart.owns", lambda device: True)
    if joined:
        monkeypatch.setattr(StagesApart, "_away", lambda self: {each.index: "127.0.0.1" for each in self._stages})
    test_models(name, in_flight, stages, host_threads)


@pytest.mark.parametrize("name", slow_except([(name,) for name in CASES], ("unet",)))
def test_in_processes(name: str) -> None:
    _, loader, layers = CASES[name]
    expected = expect(made(name), loader, 2, draws=name == "noise between")
    assert_equal(expected, fit(made(name), loader, strategy=even(layers, 2, 2, stage_hosts="processes")))


@pytest.mark.parametrize("weights", ["sync", "2bw", "xpipe", "pipeoptim"])
@pytest.mark.parametrize("owned", [False, True])
def test_weight_policies(
    weights: str, owned: bool, host_threads: list[HostThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_hetpipe.hosts.stages_apart.owns", lambda device: owned)
    _, loader, layers = CASES["views"]

    def adam() -> Learner:
        task = made("views")
        task.recipe = ADAMW
        return task

    every = 3 if weights == "2bw" else 1
    expected = expect(adam(), loader, 3, weights=weights, accumulate=every)
    strategy = even(layers, 2, 3, weights=weights, stage_hosts="processes")
    assert_equal(expected, fit(adam(), loader, strategy=strategy, accumulate_grad_batches=every))
    assert host_threads
