"""Fits whose stages are at hosts have the oracle's bits."""

from __future__ import annotations

import pytest

from lightning_hetpipe.hosts.stages_apart import StagesApart
from tests.exact.running import assert_equal, expect, fit
from tests.exact.test_captured import CASES, made
from tests.hosts.elsewhere import Hosts, elsewhere
from tests.hosts.host_threads import HostThread
from tests.support.marks import slow_except
from tests.support.models import ADAMW, Learner

ROWS = [(name, in_flight, stages) for name in CASES for in_flight, stages in ((2, 2), (3, 3), (4, 4))]
QUICK = [("views", 3, 3), ("resnet", 2, 2), ("dropout", 4, 4), ("translator", 2, 2)]


@pytest.mark.parametrize(("name", "in_flight", "stages"), slow_except(ROWS, *QUICK))
@pytest.mark.parametrize("joined", [False, True])
def test_models(
    name: str,
    in_flight: int,
    stages: int,
    joined: bool,
    host_threads: list[HostThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Among them buffers, dropout, tied weights, several pieces and inputs, and modules that are called again.

    Where hosts are joined, activations go from host to host.
    """
    if not joined:
        monkeypatch.setattr(StagesApart, "join", lambda *_: None)
    _, loader, layers = CASES[name]
    expected = expect(made(name), loader, in_flight, draws=name == "noise between")
    strategy = elsewhere(layers, min(stages, layers), in_flight)
    assert_equal(expected, fit(made(name), loader, strategy=strategy))
    assert len(host_threads) == min(stages, layers) - 1


@pytest.mark.parametrize("name", slow_except([(name,) for name in CASES], ("unet",)))
def test_in_processes(name: str, hosts: Hosts) -> None:
    _, loader, layers = CASES[name]
    expected = expect(made(name), loader, 2, draws=name == "noise between")
    assert_equal(expected, fit(made(name), loader, strategy=elsewhere(layers, 2, 2, hosts.address)))


@pytest.mark.parametrize("weights", ["sync", "2bw", "xpipe", "pipeoptim"])
def test_weight_policies(weights: str, host_threads: list[HostThread]) -> None:
    _, loader, layers = CASES["views"]

    def adam() -> Learner:
        task = made("views")
        task.recipe = ADAMW
        return task

    every = 3 if weights == "2bw" else 1
    expected = expect(adam(), loader, 3, weights=weights, accumulate=every)
    strategy = elsewhere(layers, 2, 3, weights=weights)
    assert_equal(expected, fit(adam(), loader, strategy=strategy, accumulate_grad_batches=every))
    assert host_threads
