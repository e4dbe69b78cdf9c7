"""Small LightningModules that hold their data, log in many ways, and draw no random numbers."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from tests.support.models import CLASSES, vectors

BATCHES = 7  # of an epoch


class Watched(L.LightningModule):
    """A classifier with BatchNorm, a metric of its own, and whatever scheduler it is told.

    Args:
        schedule: "step", "epoch", "plateau" or "plateau by step"; None for no scheduler.
        every: Its frequency.
    """

    def __init__(self, schedule: str | None = None, every: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES)
        )
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.schedule = schedule
        self.every = every

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("accuracy", self.accuracy)
        self.log("place", float(batch_idx), on_step=True, on_epoch=False, reduce_fx="max")
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self._evaluate(batch)
        self.log("val_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self._evaluate(batch))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self.net(batch[0])
        return logits

    def _evaluate(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([w for w in self.parameters() if w.requires_grad], lr=0.02)
        if self.schedule is None:
            return optimizer
        config: dict[str, Any] = {"interval": self.schedule, "frequency": self.every}
        if self.schedule.startswith("plateau"):
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1)
            config |= {"interval": "step" if "step" in self.schedule else "epoch", "monitor": "val_loss"}
            config |= {"frequency": 3 if "step" in self.schedule else 1, "strict": False}
        else:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **config}}

    def train_dataloader(self) -> Any:
        return vectors(26, 4)

    def val_dataloader(self) -> Any:
        return vectors(10, 4, seed=9)

    def test_dataloader(self) -> Any:
        return vectors(6, 4, seed=10)

    def predict_dataloader(self) -> Any:
        return DataLoader(vectors(6, 4, seed=11).dataset, batch_size=4)  # by name, as Lightning makes it anew
