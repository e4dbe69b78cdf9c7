"""Plain data comes back from its bytes as it was, tensors to the bit and to the stride; nothing else is let through."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import Discarded
from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.graph_code import decode_layers, encode_layers
from lightning_hetpipe.pipeline.message_code import RemoteFailure, decode, encode
from lightning_hetpipe.pipeline.plain_code import NotPlain, PlainCode
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.stage_messages import Backward, Failure, Forward
from lightning_hetpipe.pipeline.values import Addends, Value
from lightning_hetpipe.rules.versions import Reading
from tests.support.equality import assert_same

CODE = PlainCode()
X = torch.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, -(10**30), "text", ""],
        (1.5, 0.1, -0.0, math.inf, (), []),
        {"key": {1: (torch.bfloat16, torch.device("cpu"), torch.strided, torch.contiguous_format)}},
        slice(1, None, 2),
    ],
)
def test_values(value: Any) -> None:
    found = CODE.decode(CODE.encode(value))
    assert repr(found) == repr(value)


def test_a_number_that_is_none() -> None:
    assert math.isnan(CODE.decode(CODE.encode(math.nan)))


@pytest.mark.parametrize(
    "tensor",
    [
        X,
        X.permute(2, 0, 1),
        X[:, :1].expand(2, 5, 4),
        torch.ones(()).expand(3, 4),
        X[:, 1, ::2],
        torch.zeros(0, 3),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(3, dtype=torch.complex64),
        torch.tensor([math.nan, -0.0]),
    ],
)
def test_tensors(tensor: Tensor) -> None:
    one, found, other = CODE.decode(CODE.encode([torch.ones(1, dtype=torch.uint8), tensor, X]))
    assert_same(tensor, found)
    assert_same([torch.ones(1, dtype=torch.uint8), X], [one, other])
    assert found.stride() == tensor.stride()


@pytest.mark.parametrize("value", [object(), {1, 2}, nn.Linear(1, 1), torch.eye(2).to_sparse()])
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(NotPlain, match="has no place in a message"):
        CODE.encode([value])


@pytest.mark.parametrize(
    "spoil", [lambda data: data[:-1], lambda data: data + b"1", lambda data: b"", lambda data: b"1" * 9]
)
def test_spoilt_bytes_are_refused(spoil: Any) -> None:
    with pytest.raises(NotPlain):
        CODE.decode(spoil(CODE.encode([X])))


def test_messages() -> None:
    value = Value.of({"x": X, "again": (X, 3)})
    forward = Forward(7, 1, value, Reading(5, 2), Autocast((("cpu", torch.bfloat16),), False), 1, True, last=True)
    found = decode(encode(forward))
    assert found._replace(value=value) == forward
    assert_same(value.tree([X]), found.value.tree(found.value.tensors))
    backward = Backward(7, 1, 1, [X, None, Addends((X, X + 1))], {3: X}, (3,), True)
    again = decode(encode(backward))
    assert isinstance(again.gradients[2], Addends)
    assert_same(list(backward), list(again))


def test_failures() -> None:
    found = decode(encode(Failure(3, ZeroDivisionError("of a layer"))))
    assert found.minibatch == 3
    assert isinstance(found.error, RemoteFailure)
    assert str(found.error) == "ZeroDivisionError: of a layer"
    assert isinstance(decode(encode(Failure(3, Discarded()))).error, Discarded)


def test_layers_without_a_graph_are_refused() -> None:
    with pytest.raises(NotPlain, match=r"layer net\.0 is a Linear, which has no graph"):
        encode_layers([Layer("net.0", nn.Linear(1, 1))])
    with pytest.raises(NotPlain, match="no message"):
        decode_layers(b"nothing")
