"""``pytorch_lightning``, whose Trainer and LightningModule are others than those of ``lightning.pytorch``."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetpipe import HetPipeStrategy
from tests.support.small import Learner, batches, pipeline, refused
from tests.support.trainers import quiet_trainer

other = pytest.importorskip("pytorch_lightning", reason="the package that is to be told from ours is not installed")

SAID = ("HetPipeStrategy is given to a Trainer of pytorch_lightning", "write 'import lightning.pytorch as pl' for")


def test_its_trainer_is_refused_with_the_way_out() -> None:
    """It called the strategy an invalid name, and listed its own."""
    with refused(*SAID):
        other.Trainer(strategy=HetPipeStrategy(), accelerator="cpu", logger=False)
    with refused(*SAID):
        other.Trainer(strategy="hetpipe", accelerator="cpu", logger=False)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["lightning_hetpipe", "pytorch_lightning"])
def test_it_is_told_whichever_is_imported_first(first: str) -> None:
    program = (
        f"import {first}; import pytorch_lightning as pl; from lightning_hetpipe import HetPipeStrategy;"
        " pl.Trainer(strategy=HetPipeStrategy())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert SAID[0] in run.stderr.splitlines()[-1]


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
