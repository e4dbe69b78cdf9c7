"""``pytorch_lightning``, whose Trainer and LightningModule are others than those of ``lightning.pytorch``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetpipe import HetPipeStrategy
from tests.support.small import Learner, batches, pipeline
from tests.support.trainers import quiet_trainer

other = pytest.importorskip("pytorch_lightning", reason="the package that is to be told from ours is not installed")


@pytest.mark.parametrize("strategy", [HetPipeStrategy(), "hetpipe"])
def test_its_trainer_refuses_the_strategy(strategy: Any) -> None:
    """In one sentence of its own."""
    with pytest.raises(ValueError, match=r"invalid strategy name.* of `pytorch_lightning.strategies.Strategy`"):
        other.Trainer(strategy=strategy, accelerator="cpu", logger=False)


def test_what_it_has_of_its_own_works_beside_ours() -> None:
    """As a network inside a LightningModule of ours, and as the strategies of its own Trainer."""
    assert other.Trainer(strategy="auto", accelerator="cpu", logger=False).strategy is not None

    class Theirs(other.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

    task = Learner(net=nn.Sequential(Theirs(), nn.Tanh()))
    quiet_trainer(pipeline(3)).fit(task, batches())
