"""The demo's models: a small residual network for small grey images, and a small GPT over bytes."""

from __future__ import annotations

import math
from typing import Annotated

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.settings import Bounds, Size, read

_Rate = Annotated[float, Bounds(0)]
VOCABULARY = 256  # bytes
_Beta = Annotated[float, Bounds(0, 0.9999999)]


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
        self._log_results("val", batch, self.val_acc)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._log_results("test", batch, self.test_acc)

    def _log_results(self, part: str, batch: tuple[Tensor, Tensor], accuracy: MulticlassAccuracy) -> None:
        images, labels = batch
        logits = self(images)
        accuracy(logits, labels)
        self.log(f"{part}_loss", F.cross_entropy(logits, labels))
        self.log(f"{part}_acc", accuracy, prog_bar=part == "val")

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


class Embedding(nn.Module):
    """Layer that maps bytes (N, T), int64, to the sum of a token's and a position's vector, (N, T, width)."""

    def __init__(self, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.token(ids) + self.position[: ids.shape[1]])
        return x


class CausalSelfAttention(nn.Module):
    """Map (N, T, width) to the same shape. A position sees itself and earlier positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(n, t, width))
        return mixed


class Block(nn.Module):
    """A transformer block, normalised first, with dropout on each residual branch."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(width), CausalSelfAttention(width, heads), nn.Dropout(dropout))
        self.think = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        y: Tensor = x + self.think(x)
        return y


class GPT(L.LightningModule):
    """A model of the next byte. It logs `train_loss`, for val and test `_loss` (nats per byte) and `_bits_per_byte`.

    `net` is one `nn.Sequential`: the embedding, the blocks, the last norm and the head are the layers.

    Args:
        context: longest input, bytes.
        width: features per position, a multiple of `heads`.
        blocks, heads: transformer blocks, and attention heads per block.
        dropout: probability, 0..1.
        lr: AdamW's learning rate, reached after `warmup` steps.
        betas: AdamW's betas. The first is low, since staleness in a pipeline acts as momentum.

    Raises:
        SettingError: for a size below 1, or a width that is no multiple of `heads`.
    """

    def __init__(
        self,
        context: Size = 96,
        width: Size = 96,
        blocks: Size = 4,
        heads: Size = 4,
        dropout: Annotated[float, Bounds(0, 1)] = 0.1,
        lr: _Rate = 1e-3,
        betas: tuple[_Beta, _Beta] = (0.5, 0.95),
        warmup: Annotated[int, Bounds(0)] = 50,
    ) -> None:
        read(GPT, locals())
        super().__init__()
        if width % heads:
            raise SettingError(f"width={width} must be a multiple of heads={heads}")
        self.save_hyperparameters()
        self.lr = lr
        self.betas = (betas[0], betas[1])
        self.warmup = warmup
        self.net = nn.Sequential(
            Embedding(context, width, dropout),
            *(Block(width, heads, dropout) for _ in range(blocks)),
            nn.LayerNorm(width),
            nn.Linear(width, VOCABULARY),
        )
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Map bytes (N, T), int64, to logits (N, T, 256) for the byte after each byte."""
        logits: Tensor = self.net(ids)
        return logits

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the mean cross-entropy in nats per byte."""
        ids, targets = batch
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._log_loss("val", self.loss(batch))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._log_loss("test", self.loss(batch))

    def _log_loss(self, part: str, loss: Tensor) -> None:
        self.log(f"{part}_loss", loss, prog_bar=True)
        self.log(f"{part}_bits_per_byte", loss / math.log(2))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=self.betas)
        warmup = self.warmup
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, warmup)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
