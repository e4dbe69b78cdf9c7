"""Models that are no nn.Sequential train as the oracle says, bit for bit, wherever they are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.exact.pipelines import Pinned, delayed, even
from tests.exact.running import assert_equal, expect, fit
from tests.support import marks
from tests.support.captured_models import (
    GPT,
    Autoencodes,
    Contrasts,
    ResNet,
    Towers,
    Translates,
    UNet,
    Varies,
    VariesBetween,
    Views,
    Whole,
    Words,
)
from tests.support.marks import explores, slow_except
from tests.support.models import ADAMW, WORDS, Learner, images, vectors, words

# A smaller last batch has a graph of its own, which takes longer than the rest of a fit: make test has it for three.
VECTORS, TEXT = (vectors(20, 4), words(16, 4)) if marks.FEW else (vectors(18, 4), words(14, 4))
CASES: dict[str, tuple[Callable[[], Learner], DataLoader[Any], int]] = {
    "unet": (lambda: Whole(UNet()), vectors(18, 4), 6),
    "resnet": (lambda: Whole(ResNet(blocks=2), ADAMW), images(14, 4), 5),
    "gpt": (lambda: Words(GPT(blocks=2), ADAMW), TEXT, 6),
    "dropout": (lambda: Words(GPT(blocks=1, dropout=0.3), ADAMW), TEXT, 5),
    "translator": (Translates, TEXT, 6),
    "clip": (Contrasts, VECTORS, 2),
    "towers": (Towers, VECTORS, 4),
    "pieces": (Autoencodes, VECTORS, 5),
    "vae": (Varies, VECTORS, 2),
    "views": (Views, VECTORS, 6),
    "noise between": (VariesBetween, vectors(18, 4), 5),
}


def made(name: str) -> Learner:
    torch.manual_seed(7)
    return CASES[name][0]()


GRID = [
    (name, in_flight, stages)
    for name in CASES
    for in_flight in (1, 2, 3)
    for stages in (1, 2, 3)
    # With one in flight, noise in training_step itself is a plain run's: see test_captured_changes.
    if (name, in_flight) != ("noise between", 1)
]
# The others are quick elsewhere: views in test_calls, towers with one in flight in test_captured_changes.
FAST = [(name, 3, 3) for name in CASES if name not in ("gpt", "clip", "towers", "views")]
ROWS = [pytest.param(*row, marks=[] if row in FAST else pytest.mark.slow) for row in GRID]


@pytest.mark.parametrize(("name", "in_flight", "stages"), ROWS)
def test_captured_models(name: str, in_flight: int, stages: int) -> None:
    _, loader, layers = CASES[name]
    task = made(name)
    expected = expect(made(name), loader, in_flight, draws=name == "noise between", stages=stages)
    strategy = even(layers, min(stages, layers), in_flight)
    assert_equal(expected, fit(task, loader, strategy=strategy))
    if stages > 1 or in_flight > 1:  # else nothing is cut into layers
        assert sum(len(stage.layers) for stage in strategy.last_run.stages) == layers


@explores(4)
@given(data=st.data())
@pytest.mark.parametrize("name", slow_except(CASES, "clip"))
def test_any_cut_and_any_timing(name: str, data: st.DataObject) -> None:
    _, loader, layers = CASES[name]
    cuts = sorted(data.draw(st.sets(st.integers(1, layers - 1), max_size=3)))
    draws = name == "noise between"
    in_flight = data.draw(st.integers(1 + draws, 6))
    strategy = delayed(Pinned((0, *cuts), in_flight), seed=data.draw(st.integers(0, 99)))
    task = made(name)
    expected = expect(made(name), loader, in_flight, max_epochs=1, draws=draws, stages=1 + len(cuts))
    assert_equal(expected, fit(task, loader, strategy=strategy, max_epochs=1))


@pytest.mark.parametrize("in_flight", slow_except([1, 4], 4))
@pytest.mark.parametrize("name", slow_except(["resnet", "gpt", "translator", "views"], "views"))
def test_mixed_precision(name: str, in_flight: int) -> None:
    _, loader, layers = CASES[name]
    expected = expect(made(name), loader, in_flight, autocast=torch.bfloat16)
    strategy = even(layers, 3, in_flight)
    assert_equal(expected, fit(made(name), loader, strategy=strategy, precision="bf16-mixed"))


@pytest.mark.parametrize("in_flight", slow_except([1, 4], 4))
def test_lengths_that_vary(in_flight: int) -> None:
    class Averages(nn.Module):
        """Means of the words so far, with places and a mask as long as the input."""

        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.head = nn.Embedding(WORDS, 8), nn.Embedding(9, 8), nn.Linear(8, WORDS)
            self.register_buffer("mask", torch.ones(9, 9).tril())

        def forward(self, ids: Tensor) -> Tensor:
            length = ids.shape[-1]
            x = self.words(ids) + self.places(torch.arange(length))
            y: Tensor = self.head(torch.tanh(self.mask[:length, :length] @ x))
            return y

    chance = torch.Generator().manual_seed(5)
    sizes = [(2, 5), (2, 3), (3, 8), (1, 6), (2, 2), (1, 9)]
    batches = [(torch.randint(WORDS, size, generator=chance),) for size in sizes]
    loader = DataLoader(cast(Dataset[Any], batches), batch_size=None)

    def made() -> Learner:
        torch.manual_seed(7)
        return Words(Averages(), ADAMW)

    expected = expect(made(), [batches] * 2, in_flight)
    assert_equal(expected, fit(made(), loader, strategy=even(3, 3, in_flight)))
