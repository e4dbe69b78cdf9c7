"""Lightning's own command line takes the strategy by its registered name, and by its class with its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule
from omegaconf import OmegaConf
from torch import Tensor, nn

from lightning_hetpipe import HetPipeStrategy
from tests.support.marks import quick


class Small(L.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, *arguments: str) -> LightningCLI:
    quiet = ["enable_progress_bar=false", "enable_model_summary=false", "enable_checkpointing=false", "logger=false"]
    settings = [*quiet, "accelerator=cpu", "devices=1", "max_epochs=1", "limit_train_batches=3", "limit_val_batches=3"]
    given = ["fit", *(f"--trainer.{setting}" for setting in settings), f"--trainer.default_root_dir={folder}"]
    return LightningCLI(Small, BoringDataModule, args=[*given, *arguments])


@quick("arguments0-auto-auto", "arguments2-2-3")
@pytest.mark.parametrize(
    ("arguments", "stages", "in_flight"),
    [
        (["--trainer.strategy=hetpipe"], "auto", "auto"),
        (["--trainer.strategy=HetPipeStrategy", "--trainer.strategy.stages=2"], 2, "auto"),
        (
            [
                "--trainer.strategy=lightning_hetpipe.HetPipeStrategy",
                "--trainer.strategy.stages=2",
                "--trainer.strategy.in_flight=3",
                "--trainer.strategy.module=net",
                "--trainer.strategy.timeout=30",
            ],
            2,
            3,
        ),
    ],
)
def test_by_name_and_by_class(arguments: list[str], stages: Any, in_flight: Any, tmp_path: Path) -> None:
    strategy = fit(tmp_path, *arguments).trainer.strategy
    assert isinstance(strategy, HetPipeStrategy)
    assert (strategy.stages, strategy.in_flight) == (stages, in_flight)
    assert strategy.last_run.minibatches == 2


def test_the_configuration_that_it_saves_can_be_run_again(tmp_path: Path) -> None:
    class_path = "lightning_hetpipe.HetPipeStrategy"
    fit(tmp_path / "a", f"--trainer.strategy={class_path}", "--trainer.strategy.stages=2")
    saved = tmp_path / "a" / "config.yaml"
    assert OmegaConf.load(saved).trainer.strategy.init_args.stages == 2
    strategy = fit(tmp_path / "b", f"--config={saved}", f"--trainer.default_root_dir={tmp_path / 'b'}").trainer.strategy
    assert isinstance(strategy, HetPipeStrategy)
    assert strategy.stages == 2


def test_a_wrong_value_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        fit(tmp_path, "--trainer.strategy=HetPipeStrategy", "--trainer.strategy.stages=many")
    assert end.value.code == 2
    assert "many" in capsys.readouterr().err
