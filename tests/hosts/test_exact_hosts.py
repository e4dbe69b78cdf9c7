"""Fits whose stages are at hosts have the oracle's bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_hetpipe.hosts.stages_apart import StagesApart
from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.exact.test_captured import CASES, made
from tests.hosts.elsewhere import Hosts, elsewhere
from tests.hosts.host_threads import HostThread
from tests.hosts.test_other_machines import task as plain
from tests.oracle import Batch, Outputs
from tests.support.equality import assert_same
from tests.support.marks import slow_except
from tests.support.models import CLASSES, Task, vectors, whole_batches
from tests.support.trainers import quiet_trainer

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
    if name != "translator":
        loader = whole_batches(loader)
    expected = expect(made(name), loader, in_flight, draws=name == "noise between")
    strategy = elsewhere(layers, min(stages, layers), in_flight)
    assert_equal(expected, fit(made(name), loader, strategy=strategy))
    assert len(host_threads) == min(stages, layers) - 1


@pytest.mark.parametrize("name", slow_except([(name,) for name in CASES], ("unet",)))
def test_in_processes(name: str, hosts: Hosts) -> None:
    _, loader, layers = CASES[name]
    if name == "unet":
        loader = whole_batches(loader)
    expected = expect(made(name), loader, 2, draws=name == "noise between")
    assert_equal(expected, fit(made(name), loader, strategy=elsewhere(layers, 2, 2, hosts.address)))


@pytest.mark.parametrize("weights", ["sync", "2bw", "xpipe", "pipeoptim"])
def test_weight_policies(weights: str, host_threads: list[HostThread]) -> None:
    """A policy chooses the weights of a pass, whatever its layers are. `test_models` has captured layers."""
    every = 3 if weights == "2bw" else 1
    loader = vectors(18, 4)
    expected = expect(plain(), loader, 3, weights=weights, accumulate=every)
    strategy = elsewhere(6, 2, 3, weights=weights)
    assert_equal(expected, fit(plain(), loader, strategy=strategy, accumulate_grad_batches=every))
    assert host_threads


class Penalised(Task):
    """Reads a number that it computes from weights of the first stage."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)))
        self.read: list[float] = []

    def compute(self, batch: Batch) -> Outputs:
        penalty = 0.01 * next(self.net.parameters()).square().sum()
        self.read.append(float(penalty))
        return {"loss": super().compute(batch)["loss"] + penalty}


def test_numbers_are_read_of_weights_at_hosts(host_threads: list[HostThread]) -> None:
    found = []
    for strategy in (even(3, 2, 3), elsewhere(3, 2, 3)):
        quiet_trainer(strategy).fit(task := Penalised(), vectors(24, 4))
        found.append((task.read, dict(task.state_dict())))
    assert len(host_threads) == 1
    assert_same(found[0], found[1])
