"""A small residual network for small grey images."""

from __future__ import annotations

import math
from typing import Annotated

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lightning_hetpipe.settings import Bounds, Size, read

_Rate = Annotated[float, Bounds(0)]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut: (N, C, H, W) to (N, width, H/stride, W/stride)."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(L.LightningModule):
    """A classifier of images (N, 1, H, W). It logs `train_loss`, `val_loss`, `val_acc`, `test_loss`, `test_acc`.

    `net` is one `nn.Sequential`. Stages can begin between its children, and inside its residual blocks.

    Args:
        width: channels of the first residual block. The second half of the blocks has twice as many.
        blocks: residual blocks.
        lr: peak learning rate of AdamW, reached after a third of the steps and annealed to zero (one cycle).

    Raises:
        SettingError: for a size below 1, or a rate below 0.
    """

    def __init__(
        self, width: Size = 16, blocks: Size = 4, classes: Size = 10, lr: _Rate = 0.01, weight_decay: _Rate = 0.01
    ) -> None:
        read(ResNet, locals())
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.weight_decay = weight_decay
        layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
        for block in range(blocks):
            out = width if block < blocks // 2 else 2 * width
            layers.append(ResidualBlock(channels, out, stride=1 if out == channels else 2))
            channels = out
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
        self.val_acc = MulticlassAccuracy(classes, average="micro")
        self.test_acc = MulticlassAccuracy(classes, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 1, H, W) to logits (N, classes)."""
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_acc(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.test_acc(logits, labels)
        self.log("test_loss", F.cross_entropy(logits, labels))
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        steps = max(1, self.trainer.estimated_stepping_batches)
        if math.isinf(steps):  # trained until stopped: there is no end to anneal to
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: one_cycle((step + 1) / steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def one_cycle(progress: float) -> float:
    """Return the learning rate's factor, 0..1, at `progress` (0..1) of the steps: up for a third, then a cosine."""
    rise = 1 / 3
    if progress < rise:
        return progress / rise
    return (1 + math.cos(math.pi * (min(progress, 1) - rise) / (1 - rise))) / 2
