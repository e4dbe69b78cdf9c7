"""Evaluations of torch's modules for attention, which compute by fused operators where there are no gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.evaluation.evaluating import Model, pipeline
from tests.support.equality import assert_same
from tests.support.models import vectors
from tests.support.trainers import quiet_trainer


class Attends(nn.Module):
    """Gives ``inner`` six tokens for each sample, and what ``more`` says."""

    def __init__(self, inner: nn.Module, more: Callable[[Tensor], dict[str, Any]] = lambda tokens: {}) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.linspace(-1.0, 1.0, 8))
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, :, None] * self.scale
        if isinstance(self.inner, nn.TransformerEncoder):
            out: Tensor = self.inner(tokens, **self.more(tokens))
            return out
        found: Tensor = self.inner(tokens, tokens)
        return found


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)


def causal(tokens: Tensor) -> dict[str, Any]:
    return {"mask": nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]), "is_causal": True}


def padded(tokens: Tensor) -> dict[str, Any]:
    return {"src_key_padding_mask": torch.arange(6).expand(len(tokens), 6) > 3}


def predicted(make: Callable[[], nn.Module], strategy: Any, **settings: Any) -> tuple[Any, list[str]]:
    torch.manual_seed(5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = quiet_trainer(strategy, **settings).predict(Model(make()), vectors(23, 4))
    return found, [str(each.message) for each in said if "does not run in the pipeline" in str(each.message)]


def decoder(layers: int = 2) -> nn.Module:
    return Attends(nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8, batch_first=True), layers))


@pytest.mark.parametrize(
    ("make", "inference_mode"),
    [
        (lambda: Attends(nn.TransformerEncoder(layer(), 2)), True),
        (lambda: Attends(nn.TransformerEncoder(layer(), 2), causal), True),
        (lambda: Attends(nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False), padded), True),
        pytest.param(decoder, False, marks=pytest.mark.slow),
        (lambda: Attends(nn.Transformer(8, 2, 1, 1, 8, batch_first=True)), False),
    ],
)
def test_attention_is_pipelined_to_the_plain_values(make: Callable[[], nn.Module], inference_mode: bool) -> None:
    """Graphs held the operators that training computes by, whose values are others in the last bits."""
    stages: set[int] = set()
    strategy = pipeline()
    strategy._before_pass = lambda stage, work, batch: stages.add(stage)
    found, said = predicted(make, strategy, inference_mode=inference_mode)
    assert not said
    assert stages == {0, 1}
    assert_same(predicted(make, "auto", inference_mode=inference_mode)[0], found)


def test_a_decoder_asks_for_no_inference_mode() -> None:
    """Torch computes its projections otherwise in it while it is watched; the remedy that is told is tried above."""
    _, said = predicted(partial(decoder, 1), pipeline(module="net"))
    assert "set Trainer(inference_mode=False)" in said[0]


def test_a_padding_mask_makes_nested_tensors() -> None:
    """Nested tensors are in no graph; the remedy that is told is tried above."""

    def make() -> nn.Module:
        return Attends(nn.TransformerEncoder(layer(), 1), padded)

    found, said = predicted(make, pipeline(module="net"))
    assert "make it with enable_nested_tensor=False" in said[0]
    assert_same(predicted(make, "auto")[0], found)
