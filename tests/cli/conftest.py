"""hetpipe-train inside the test's process, which saves seconds, and a model of a user's to run with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.composing import compose_once

USERS_MODEL = """
import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    def __init__(self, fails=None, signal=None, refuses=False, width: int = 8):
        super().__init__()
        if refuses:
            raise ValueError("a bug in __init__")
        self.fails, self.signal = fails, signal
        self.net = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fails:
            raise ValueError("a bug in training_step")
        if self.signal is not None and batch_idx == 1:
            os.kill(os.getpid(), self.signal)
        loss = self.net(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(64, 2)), batch_size=8)
"""

USERS_EXPERIMENT = """
# @package _global_
model:
  _target_: users_model.Model
data:
  _target_: users_model.Data
trainer:
  accelerator: cpu
  max_epochs: 1
strategy:
  stages: 2
"""

Train = Callable[..., None]
Ends = Callable[..., tuple[str, str]]


@pytest.fixture(autouse=True)
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compose_once(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: empty but for a user's model and experiment."""
    (tmp_path / "users_model.py").write_text(USERS_MODEL)
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "mine.yaml").write_text(USERS_EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Runs hetpipe-train with these arguments in `folder`, and leaves the process as it was."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    monkeypatch.delitem(sys.modules, "users_model", raising=False)

    from lightning_hetpipe.cli.hetpipe_train import main  # here, as tests.support.forks begins without ours

    def run(*arguments: str) -> None:
        quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]  # the process's logging stays as it is
        monkeypatch.setattr(sys, "argv", ["hetpipe-train", *arguments, *quiet])
        main()

    return run


@pytest.fixture
def ends(train: Train, capsys: pytest.CaptureFixture[str]) -> Ends:
    """Runs hetpipe-train with these arguments, which must end with ``code``; gives its output and its errors."""

    def run(code: int, *arguments: str) -> tuple[str, str]:
        with pytest.raises(SystemExit) as end:
            train(*arguments)
        assert end.value.code == code
        return capsys.readouterr()

    return run
