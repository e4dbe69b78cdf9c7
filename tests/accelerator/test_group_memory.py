"""Memory of a group's devices in a run, next to what its plan says, on devices that count bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.planning.model.estimate import Estimate
from tests.accelerator.four_devices import DEVICES, LARGE, MARGIN, cluster, limit, peaks, trainer_on
from tests.oracle import Batch, Outputs
from tests.split.nets import Block
from tests.support.accelerator import TestAccelerator
from tests.support.marks import slow_except
from tests.support.models import ADAMW, Learner

ROUGH = 2.0
"""Bytes that a plan says for a device beside the first one, as a multiple of those that it holds, at the most."""


class Squares(Learner):
    """Makes what ``net`` gives for (N, *sizes) small."""

    def __init__(self, net: nn.Module, *sizes: int) -> None:
        super().__init__(ADAMW)
        self.net = net
        self.sizes = sizes

    def compute(self, batch: Batch) -> Outputs:
        return {"loss": self.net(batch[0]).square().mean()}

    def data(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(24, *self.sizes), torch.zeros(24)), 4)


def pixels() -> Squares:
    """Activations take most of the memory."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)]
    return Squares(nn.Sequential(*layers), 3, 32, 32)


def heavy() -> Squares:
    """Weights take most of the memory."""
    sizes = [64, 1024, 512, 512, 5]
    layers = [(nn.Linear(one, other), nn.Tanh()) for one, other in pairwise(sizes)]
    return Squares(nn.Sequential(*(each for pair in layers for each in pair)), 64)


def blocks() -> Squares:
    return Squares(nn.Sequential(nn.Linear(8, 64), Block(64, 4, 0.0), Block(64, 4, 0.0)), 32, 8)


class AfterTheFirst(L.Callback):
    """Has peaks be those of a run that goes on, not of its first minibatch, which runs on the first device alone."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for device in range(DEVICES if batch_idx == 0 else 0):
            torch.accelerator.reset_peak_memory_stats(device)


@pytest.mark.usefixtures("own_profiles")
@pytest.mark.parametrize(
    ("make", "shares"),
    slow_except(
        [(make, shares) for make in (pixels, heavy, blocks) for shares in ((6, 1, 0), (1, 3, 2))], (heavy, (1, 3, 2))
    ),
)
def test_no_device_has_more_than_its_plan_says(
    make: Callable[[], Squares], shares: Sequence[int], planned: list[Estimate], accelerator: TestAccelerator
) -> None:
    limit(*LARGE)
    task = make()
    strategy = HetPipeStrategy(cluster=cluster(*LARGE), split={0: shares}, in_flight=3, weights="stash")
    trainer_on(accelerator, strategy, max_epochs=1, callbacks=[AfterTheFirst()]).fit(task, task.data())
    (stage,) = planned[-1].stages
    assert stage.divided is not None
    home, *members = zip(peaks(), stage.divided.taken, strict=False)
    assert home[0] <= MARGIN * home[1]
    for (held, said), share in zip(members, shares[1:], strict=True):
        assert held <= MARGIN * said
        assert said <= ROUGH * held
        assert bool(said) == bool(share)
