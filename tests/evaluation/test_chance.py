"""Random numbers of an evaluation in a pipeline belong to the batch: no timing, stage or cut changes them (law L7)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.evaluation.evaluating import Model
from tests.exact.pipelines import Pinned, delayed
from tests.support.equality import assert_same, difference
from tests.support.marks import quick
from tests.support.models import vectors
from tests.support.trainers import quiet_trainer


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + torch.rand_like(x)
        return y


class Captured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Noisy(), Noisy(), Noisy()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Draws(Model):
    def step(self, x: Tensor, batch_idx: int) -> Any:
        return super().step(x + torch.randn_like(x), batch_idx) + torch.rand(())


def run(sequential: bool, cuts: tuple[int, ...], in_flight: int, seed: int) -> Any:
    torch.manual_seed(6)
    net = nn.Sequential(Noisy(), Noisy(), Noisy()) if sequential else Captured()
    torch.manual_seed(6)
    return quiet_trainer(delayed(Pinned(cuts, in_flight), seed)).predict(Draws(net), vectors(23, 4))


@quick("True")
@pytest.mark.parametrize("sequential", [True, False])
def test_draws_belong_to_the_batch(sequential: bool) -> None:
    first = run(sequential, (0, 1), 2, 1)
    assert_same(first, run(sequential, (0, 1), 2, 2))
    assert_same(first, run(sequential, (0, 2), 4, 3))
    assert_same(first, run(sequential, (0, 1, 2), 3, 4))
    assert difference(first[1], first[2]) is not None


class Again(Model):
    """Calls its network twice, on the same input."""

    def step(self, x: Tensor, batch_idx: int) -> Any:
        return torch.stack([self.net(x), self.net(x)])


@pytest.mark.parametrize("sequential", [True, False])
def test_each_call_draws_by_itself(sequential: bool) -> None:
    """In the first batch, which is watched, and in the pipeline; whatever the stages."""
    found: list[Any] = []
    for cuts, in_flight in (((0, 1), 2), ((0, 1, 2), 4)):
        torch.manual_seed(6)
        net = nn.Sequential(Noisy(), Noisy(), Noisy()) if sequential else Captured()
        torch.manual_seed(6)
        found.append(quiet_trainer(Pinned(cuts, in_flight)).predict(Again(net), vectors(23, 4)))
    assert_same(*found)
    assert not any(torch.equal(one, other) for one, other in found[0])


def test_the_process_does_not_notice() -> None:
    class Looks(Draws):
        def on_predict_start(self) -> None:
            self.start = torch.get_rng_state()

        def on_predict_end(self) -> None:
            self.end = torch.get_rng_state()

    module = Looks(nn.Sequential(Noisy(), Noisy()))
    quiet_trainer(Pinned((0, 1), 3)).predict(module, vectors(23, 4))
    assert torch.equal(module.start, module.end)
