"""Which attributes of a module are the user's, and whether one of them changed."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from lightning_hetpipe.capture.contents import attributes_with_contents, changed_attribute, plain_attributes
from lightning_hetpipe.pipeline.random.generators import attach
from lightning_hetpipe.redirect import Redirect

pruned: Any = prune.l1_unstructured  # torch has no types here


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2))
        self.scale = nn.Parameter(torch.ones(2))
        self.rate = 0.5
        self.names = ["a"]
        self.table = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.rate


def test_only_what_the_user_set() -> None:
    layer = Layer()
    assert plain_attributes(layer) == {"rate": 0.5, "names": layer.names, "table": layer.table}
    layer.train(False)
    layer.register_forward_hook(lambda *_: None)
    layer.compile(backend="eager")
    assert list(plain_attributes(layer)) == ["rate", "names", "table"]


def test_stand_ins_for_forward_are_left_out() -> None:
    layer = Layer()

    def own(x: Tensor) -> Tensor:
        return x

    attach(layer, "net.0")
    redirect = Redirect(layer, "forward", lambda redirect, x: x)
    assert "forward" not in plain_attributes(layer)
    redirect.remove()
    other = Layer()
    vars(other)["forward"] = own
    attach(other, "net.0")
    redirect = Redirect(other, "forward", lambda redirect, x: x)
    assert plain_attributes(other)["forward"] is own
    redirect.remove()


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(2, 2),
        nn.GRU(2, 2, num_layers=2),
        nn.MultiheadAttention(2, 1),
        nn.TransformerEncoderLayer(2, 1, 4),
        nn.BatchNorm1d(2),
        weight_norm(nn.Linear(2, 2)),
        spectral_norm(nn.Linear(2, 2)),
        pruned(nn.Linear(2, 2), "weight", amount=0.5),
        parametrizations.weight_norm(nn.Linear(2, 2)),
        parametrizations.spectral_norm(nn.Linear(2, 2)),
        parametrizations.orthogonal(nn.Linear(2, 2)),
        parametrizations.weight_norm(nn.LSTM(2, 2), "weight_hh_l0"),
    ],
    ids=lambda module: type(module).__name__,
)
def test_torchs_own_modules_change_nothing_in_forward(module: nn.Module) -> None:
    before = [attributes_with_contents(part) for part in module.modules()]
    x = torch.randn(3, 2, 2) if not isinstance(module, nn.BatchNorm1d) else torch.randn(3, 2)
    module(x, x, x) if isinstance(module, nn.MultiheadAttention) else module(x)
    after = [attributes_with_contents(part) for part in module.modules()]
    assert [changed_attribute(*pair) for pair in zip(before, after, strict=True)] == [None] * len(before)


TENSOR = torch.ones(2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {}),
        ({}, {"a": None}),
        ({"a": "x"}, {"a": "y"}),
        ({"a": (1, ("x",))}, {"a": (1, ("y",))}),
        ({"a": TENSOR}, {"a": TENSOR.clone()}),
        ({"a": (1, TENSOR)}, {"a": (1, TENSOR.clone())}),
        ({"a": []}, {"a": []}),
    ],
)
def test_changed(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert changed_attribute({"same": 0, **before}, {"same": 0, **after}) == "a"


def test_unchanged() -> None:
    before = {"a": 1000, "b": 0.5, "c": "text", "d": None, "e": (1, ("x", TENSOR)), "f": TENSOR, "g": float("nan")}
    after = {**before, "a": int("1000"), "c": "".join(["te", "xt"]), "e": (1, ("x", TENSOR))}
    assert changed_attribute(before, after) is None


def test_strangers_are_not_asked_whether_they_are_equal() -> None:
    class Stranger:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

    assert changed_attribute({"a": Stranger()}, {"a": Stranger()}) == "a"


@pytest.mark.parametrize("value", [[1], {"k": 1}, {1}, deque([1])])
def test_contents_are_compared_too(value: Any) -> None:
    layer = Layer()
    layer.names = value
    before = attributes_with_contents(layer)
    assert changed_attribute(before, attributes_with_contents(layer)) is None
    layer.names = copy.copy(value)
    assert changed_attribute(before, attributes_with_contents(layer)) == "names"
    layer.names = value
    value.clear()
    assert changed_attribute(before, attributes_with_contents(layer)) == "names"
