"""Tasks of launches of several virtual workers: each trains on data of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tests.oracle import Batch, Outputs, Recipe
from tests.support import models
from tests.support.models import CLASSES, Learner, Task, decay, mlp, sgd


class Sums(nn.Module):
    """Shifts by the sums of what went before: a buffer that is in no checkpoint, and a whole number that is."""

    sums: Tensor
    count: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(width), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.sums
        self.sums.mul_(0.5).add_(x.detach().mean(0))
        self.count.add_(1)
        return y


class As(nn.Module):
    """Its input, in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def frozen() -> Learner:
    task = mlp()
    task.net[0].requires_grad_(False)
    return task


class Unused(Task):
    """Has a layer that the loss does not reach."""

    def __init__(self, net: nn.Sequential, recipe: Recipe) -> None:
        super().__init__(net, recipe)
        self.unused = nn.Linear(3, 3)


def buffers() -> Learner:
    return Task(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), Sums(8), nn.Linear(8, CLASSES)))


def wide() -> Learner:
    """Weights of 1.1 MB, in two layers of about equal size."""
    return Task(
        nn.Sequential(
            nn.Linear(6, 384), nn.Tanh(), nn.Linear(384, 352), nn.Tanh(), nn.Linear(352, 384), nn.Linear(384, CLASSES)
        )
    )


def dtypes() -> Learner:
    """Layers in three dtypes."""
    low, high = torch.bfloat16, torch.float64
    layers = [nn.Linear(6, 8), As(high), nn.Linear(8, 8, dtype=high), nn.Tanh(), As(low), nn.Linear(8, 8, dtype=low)]
    return Task(nn.Sequential(*layers, As(torch.float32), nn.Linear(8, CLASSES)))


class InDoubles(Task):
    """Computes in float64."""

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        return super().compute((x.double(), y))


def drops() -> Learner:
    """Draws dropout, and has running statistics; no graph of it is needed, so that fits begin soon."""
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Dropout(0.2)]
    return Task(nn.Sequential(*layers, nn.Linear(8, CLASSES)))


def doubles() -> Learner:
    return mlp(task=InDoubles).double()


def warm_up(optimizer: Optimizer) -> LambdaLR:
    """Over more steps than an epoch has: the rate follows from how many the scheduler has counted."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 16))


TASKS: dict[str, tuple[Callable[[], Learner], Callable[..., DataLoader[Any]]]] = {
    "mlp": (lambda: models.mlp(models.ADAMW), models.vectors),
    "resnet": (models.resnet, models.images),
    "transformer": (models.transformer, models.sentences),
    "tied": (models.tied_language_model, models.sentences),
    "by step": (lambda: mlp(Recipe(sgd, decay)), models.vectors),
    "groups by step": (lambda: models.transformer(Recipe(models.two_groups, warm_up)), models.sentences),
    "groups by epoch": (lambda: models.transformer(Recipe(models.two_groups, decay, "epoch")), models.sentences),
    "by epoch": (lambda: mlp(Recipe(sgd, decay, "epoch")), models.vectors),
    "frozen": (frozen, models.vectors),
    "unused": (lambda: mlp(task=Unused), models.vectors),
    "buffers": (buffers, models.vectors),
    "dtypes": (dtypes, models.vectors),
    "doubles": (doubles, models.vectors),
    "drops": (drops, models.vectors),
    "wide": (wide, models.vectors),
}
