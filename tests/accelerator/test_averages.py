"""Averages of weights, which callbacks keep, take no device's room for the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe import HetPipeStrategy
from tests.accelerator.four_devices import DEVICES, trainer_on
from tests.accelerator.large_models import Evaluated
from tests.oracle import Batch, Outputs, Recipe
from tests.support.accelerator import TestAccelerator, set_limit
from tests.support.equality import assert_same
from tests.support.trainers import quiet_trainer

WIDTH = 256
PLAIN_SGD = Recipe(lambda model: torch.optim.SGD(model.parameters(), 1e-2))

pytestmark = pytest.mark.usefixtures("own_profiles")


class Eight(Evaluated):
    def __init__(self) -> None:
        super().__init__(PLAIN_SGD)
        torch.manual_seed(7)
        self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    def compute(self, batch: Batch) -> Outputs:
        (x,) = batch
        return {"loss": F.mse_loss(self.net(x), x.roll(1, -1))}


def rows() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(3))), 4)


AVERAGING: dict[str, Callable[[], L.Callback]] = {
    "ema": lambda: EMAWeightAveraging(decay=0.5),
    "swa": lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1, device=None),
}


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("kind", AVERAGING)
def test_averages_lie_on_the_host(kind: str, in_flight: int, accelerator: TestAccelerator) -> None:
    """Lightning would have all of them on the root device, which has room for half of the weights."""
    averaging, plain = AVERAGING[kind](), Eight()
    settings: dict[str, Any] = {"max_epochs": 3}
    weights = sum(weight.nbytes for weight in plain.parameters())
    for index in range(DEVICES):
        # Live weights and gradients, and here two versions more and gradients that wait.
        set_limit(index, weights * (3 if in_flight == 1 else 6) // DEVICES)
    task = Eight()
    strategy = HetPipeStrategy(stages=DEVICES, in_flight=in_flight, weights="sync" if in_flight > 1 else "auto")
    trainer_on(accelerator, strategy, callbacks=[averaging], **settings).fit(task, rows(), rows())
    quiet_trainer(callbacks=[AVERAGING[kind]()], **settings).fit(plain, rows(), rows())
    assert_same(dict(plain.named_parameters()), dict(task.cpu().named_parameters()))
    assert vars(averaging)["_device"] is None  # as it was given
