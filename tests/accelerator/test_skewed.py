"""Models whose time lies in other layers than their bytes: stages of equal times would not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError
from tests.accelerator.four_devices import DEVICES, SHARE, peaks, trainer_on
from tests.accelerator.large_models import Evaluated
from tests.exact.running import expect
from tests.oracle import Batch, Outputs
from tests.support.accelerator import NAME, TestAccelerator, set_limit
from tests.support.equality import assert_same
from tests.support.models import ADAMW
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer

WIDTH = 512

pytestmark = pytest.mark.usefixtures("own_profiles")


class Busy(nn.Module):
    """Computes for long on few weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x * self.scale).logcumsumexp(-1)  # one operator, as capture takes long for many
        return x


class Skewed(Evaluated):
    """Its time is in its first four layers, and its bytes are in its last eight."""

    def __init__(self) -> None:
        super().__init__(ADAMW)
        torch.manual_seed(1)
        self.net = nn.Sequential(*[Busy() for _ in range(4)], *[nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    def compute(self, batch: Batch) -> Outputs:
        (x,) = batch
        y = self.net(x)
        return {"loss": y.square().mean(), "logits": y.detach()}


def rows() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(3))), 8)


def limit_to(copies: float) -> list[int]:
    """Limits each device to a part of ``copies`` times the model's bytes, as a model of SHARE devices has it."""
    each = int(copies * sum(weight.nbytes for weight in Skewed().parameters()) / SHARE)
    for index in range(DEVICES):
        set_limit(index, each)
    return [each] * DEVICES


@pytest.mark.parametrize("hook", ["validate", "test"])
def test_evaluation_without_a_fit(hook: str, accelerator: TestAccelerator) -> None:
    expected = getattr(quiet_trainer(), hook)(Skewed(), rows(), verbose=False)
    trainer = trainer_on(accelerator, HetPipeStrategy(stages=DEVICES, in_flight=2))
    limit_to(1)
    assert getattr(trainer, hook)(Skewed(), rows(), verbose=False) == expected


def test_a_device_that_is_full_already(accelerator: TestAccelerator) -> None:
    """Its free bytes were taken for a setting, and for MiB."""
    set_limit(2, 300_000)
    trainer = trainer_on(accelerator, stashing())
    with pytest.raises(SettingError, match=rf"{NAME}:2 \(test accelerator\) has \d+.* KiB free, as other processes"):
        trainer.fit(Skewed(), rows())


@pytest.mark.parametrize("function", ["mem_get_info", "get_device_properties"])
def test_a_device_whose_memory_nobody_tells(
    accelerator: TestAccelerator, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPS is one: an AttributeError came from inside. The CPU, which the error names, trains."""
    monkeypatch.delattr(getattr(torch, NAME), function)
    with pytest.raises(SettingError, match=rf"accelerator='{NAME}' has no torch.{NAME}.{function}, by which stages"):
        trainer_on(accelerator, stashing()).fit(Skewed(), rows())


def test_training(accelerator: TestAccelerator) -> None:
    """Weights, two versions, gradients, the optimizer's state, its step: the plan by time alone was only warned of."""
    expected = expect(Skewed(), rows(), 2, max_epochs=1)
    strategy, task = stashing(stages=DEVICES, in_flight=2), Skewed()
    limits = limit_to(12)
    trainer_on(accelerator, strategy, max_epochs=1).fit(task, rows())
    assert all(taken <= most for taken, most in zip(peaks(), limits, strict=True))
    assert_same(expected.states[-1].weights, dict(task.cpu().named_parameters()))
