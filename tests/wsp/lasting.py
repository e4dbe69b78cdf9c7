"""A user's script: two virtual workers train on data from processes of a DataLoader's, until something ends them.

Run as ``python -m tests.wsp.lasting ENDING``; says on standard output when each virtual worker trains.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetpipe import HetPipeStrategy, WSPCallback
from lightning_hetpipe.launch import parent_watch
from tests.support.trainers import quiet_trainer

PATIENCE = 200.0
"""Seconds until a process is forced to end."""


class Endless(Dataset[Tensor]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((8,), index / len(self))


class Lasting(L.LightningModule):
    """Ends as it is told to, in its fourth minibatch or in validation; "last" has it train until somebody ends it."""

    def __init__(self, ending: str) -> None:
        super().__init__()
        self.ending = ending
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            # In one write, lest the lines of two processes mix, as with PYTHONUNBUFFERED=1.
            os.write(1, f"training {self.global_rank}\n".encode())
            if self.ending == "raise" and self.global_rank == 1:
                raise ValueError("a bad batch")
            if self.ending == "lose" and self.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-4)


def be_patient() -> None:
    """Has nobody be killed who only gets little of a busy machine, and so leaves files: not even by torch."""
    parent_watch.GRACE = PATIENCE
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = PATIENCE


def main(ending: str) -> None:
    be_patient()
    strategy = HetPipeStrategy(virtual_workers=2, stages=2, wsp=WSPCallback(lease=PATIENCE))
    trainer = quiet_trainer(strategy, max_steps=8 if ending in ("return", "lose") else -1, max_epochs=-1)
    trainer.fit(Lasting(ending), DataLoader(Endless(), 4, num_workers=1))


if __name__ == "__main__":
    main(sys.argv[1])
