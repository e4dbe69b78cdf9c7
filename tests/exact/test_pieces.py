"""Models that are called in pieces, with the user's own code between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.exact.pipelines import Pinned, even
from tests.exact.running import assert_equal, expect, fit
from tests.oracle import Batch, Outputs, Recipe
from tests.support.marks import quick
from tests.support.models import ADAMW, CLASSES, SGD, Pieces, Task, adamw, vectors


@quick("3-cuts1", "3-cuts3", "3-cuts6")
@pytest.mark.parametrize("cuts", [(0,), (0, 3), (0, 2), (0, 5), (0, 2, 5), (0, 1, 3, 6), (0, 1, 2, 4)])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_encoder_and_decoder(cuts: tuple[int, ...], in_flight: int) -> None:
    # Layers 0-2 are the encoder's, 3-6 the decoder's: stages begin before, at and after the boundary.
    task, loader = Pieces(ADAMW), vectors(18, 4)
    assert_equal(expect(task, loader, in_flight), fit(task, loader, strategy=Pinned(cuts, in_flight)))


@pytest.mark.parametrize("in_flight", [2, 5])
def test_pieces_accumulate_and_clip(in_flight: int) -> None:
    task, loader = Pieces(SGD), vectors(30, 4)
    expected = expect(task, loader, in_flight, accumulate=3, clip_norm=0.1, max_epochs=3)
    settings: dict[str, Any] = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1, "max_epochs": 3}
    assert_equal(expected, fit(task, loader, strategy=even(7, 3, in_flight), **settings))


class Three(Pieces):
    """Three pieces, the middle one's output used by the loss only through the last, and an auxiliary head's loss."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.25), nn.Tanh())

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        z = self.encoder(x)
        # A shortcut around the middle: z gets gradients from two places in the user's code.
        y = self.decoder(z + 2 * self.middle(z * z))
        return {"loss": F.mse_loss(y, x) + z.abs().mean(), "y": y.detach()}


@quick("cuts1")
@pytest.mark.parametrize("cuts", [(0,), (0, 4), (0, 2, 5, 8)])
def test_three_pieces(cuts: tuple[int, ...]) -> None:
    task, loader = Three(Recipe(adamw)), vectors(18, 4)
    assert_equal(expect(task, loader, 4), fit(task, loader, strategy=Pinned(cuts, 4)))


class Halved(Pieces):
    """Trains its decoder only in part: the code is cut off from the encoder's gradient."""

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        with torch.no_grad():
            z = self.encoder(x)
        y = self.decoder(z)
        return {"loss": F.mse_loss(y, x)}


class Detached(Pieces):
    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        y = self.decoder(self.encoder(x).detach())
        return {"loss": F.mse_loss(y, x)}


@pytest.mark.parametrize("kind", [Halved, Detached])
def test_a_piece_without_gradient(kind: type[Pieces]) -> None:
    task, loader = kind(SGD), vectors(18, 4)
    assert_equal(expect(task, loader, 3), fit(task, loader, strategy=Pinned((0, 2, 4), 3)))


class Carry(nn.Module):
    """Hands a shortcut on to later layers, beside its own output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pair: tuple[Tensor, Tensor] | Tensor) -> tuple[Tensor, Tensor]:
        x, shortcut = pair if isinstance(pair, tuple) else (pair, pair)
        return torch.tanh(self.linear(x)), shortcut


class Join(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


@quick("cuts1", "cuts3")
@pytest.mark.parametrize("cuts", [(0,), (0, 2), (0, 1, 3), (0, 2, 3, 4)])
def test_layers_that_hand_on_tuples(cuts: tuple[int, ...]) -> None:
    net = nn.Sequential(nn.Linear(6, 12), Carry(12), Carry(12), Carry(12), Join(), nn.Linear(12, CLASSES))
    task, loader = Task(net), vectors(18, 4)
    assert_equal(expect(task, loader, 3), fit(task, loader, strategy=Pinned(cuts, 3)))
