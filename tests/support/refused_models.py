"""Models that ``torch.export`` refuses as a whole, though their parts can be captured."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracle import Batch, Outputs, Recipe
from tests.support.models import CLASSES, SGD, Learner


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return y


class Checked(nn.Module):
    """Checks its data in front of every block, scales what it gets by a parameter of its own, and computes its loss.

    Args:
        blocks: How many.
        dropout: That of blocks, and of the module's own code.
    """

    def __init__(self, blocks: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList([Block(8, dropout) for _ in range(blocks)])
        self.scale = nn.Parameter(torch.ones(8))
        self.dropout = nn.Dropout(dropout)  # outside of every piece
        self.largest = 0.0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        x = self.stem(x)
        for block in self.blocks:
            if not math.isfinite(x.sum().item()):
                raise ValueError("the input is not finite")
            x = block(x * self.scale)
        x = self.dropout(x)
        self.largest = x.abs().max().item()
        logits = self.head(x)
        kept = labels < CLASSES - 1
        loss = F.cross_entropy(logits[kept], labels[kept]) if kept.any() else logits.sum() * 0.0
        return {"loss": loss, "logits": logits}


class Checks(Learner):
    """Trains a :class:`Checked`."""

    def __init__(self, blocks: int = 3, dropout: float = 0.0, recipe: Recipe = SGD) -> None:
        super().__init__(recipe)
        self.model = Checked(blocks, dropout)

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        outputs = self.model(x, labels=y)
        return {
            "loss": outputs["loss"],
            "logits": outputs["logits"].detach(),
            "largest": torch.tensor(self.model.largest),
        }
