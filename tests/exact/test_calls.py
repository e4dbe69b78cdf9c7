"""Pipelined modules that ``training_step`` calls several times: two views of a batch, shared parts, recurrent ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.exact.pipelines import Pinned
from tests.exact.running import Record, assert_equal, expect, fit
from tests.oracle import Batch, Outputs, Recipe
from tests.support.marks import slow_except
from tests.support.models import ADAMW, SGD, Learner, vectors


class Encoder(nn.Module):
    """A backbone that is run as a graph."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, width), nn.BatchNorm1d(width)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.drop(torch.relu(self.norm(self.first(x)))))
        return y


def sequential() -> nn.Sequential:
    """A backbone whose layers are run as they are."""
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 8)]
    return nn.Sequential(*layers)


def contrastive(one: Tensor, other: Tensor) -> Tensor:
    """NT-Xent of two views."""
    both = F.normalize(torch.cat([one, other]))
    scores = (both @ both.T / 0.5).masked_fill(torch.eye(len(both), dtype=torch.bool), float("-inf"))
    return F.cross_entropy(scores, torch.arange(len(both)).roll(len(one)))


class SimCLR(Learner):
    """Two views of each sample go through backbone and head."""

    def __init__(self, backbone: nn.Module, recipe: Recipe = SGD) -> None:
        super().__init__(recipe)
        self.backbone = backbone
        self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        views = self.head(self.backbone(x + 0.1)), self.head(self.backbone(x * 1.1))
        return {"loss": contrastive(*views), "one": views[0].detach(), "other": views[1].detach()}


CUTS = [(0,), (0, 2), (0, 1, 3), (0, 3, 5)]
"""Split points of two pieces with three to five layers each."""


def check(task: Learner, cuts: Sequence[int], in_flight: int, **settings: Any) -> Record:
    loader = vectors(26, 4)
    expected = expect(task, loader, in_flight)
    record = fit(task, loader, strategy=Pinned(cuts, in_flight, **settings))
    assert_equal(expected, record)
    return record


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
@pytest.mark.parametrize("backbone", [Encoder, sequential])
def test_two_views(backbone: Any, cuts: Sequence[int], in_flight: int) -> None:
    """Statistics, masks and sums of gradients are those of a plain loop."""
    torch.manual_seed(0)
    check(SimCLR(backbone(), ADAMW), cuts, in_flight)
