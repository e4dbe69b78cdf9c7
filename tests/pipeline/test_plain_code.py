"""Plain data comes back from its bytes as it was, tensors to the bit and to the stride; nothing else is let through."""

from __future__ import annotations

import collections
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import Discarded, SettingError
from lightning_hetpipe.pipeline.dtypes import Autocast
from lightning_hetpipe.pipeline.graph_code import layers_as_data, layers_of_data
from lightning_hetpipe.pipeline.plain_code import NotPlain, PlainCode, RemoteFailure
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.stage_messages import (
    RECORDS,
    Backward,
    Failure,
    Forward,
)
from lightning_hetpipe.pipeline.values import Addends, Value
from lightning_hetpipe.rules.versions import Reading
from lightning_hetpipe.torch_private.tensors import pytree
from tests.support.equality import assert_same

CODE = PlainCode(RECORDS)
X = torch.arange(24.0).reshape(2, 3, 4)


def again(value: Any) -> Any:
    """``value``, as it comes back from its bytes."""
    text, tensors = CODE.write(value)
    return read(text, b"".join(tensors))


def read(text: bytes, data: bytes) -> Any:
    source = memoryview(bytearray(data))

    def take(length: int) -> Tensor:
        nonlocal source
        if length > len(source):
            raise ValueError("there are no more")
        found, source = source[:length], source[length:]
        return torch.frombuffer(found, dtype=torch.uint8).clone()

    return CODE.read(text, take)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, -(10**30), "text", ""],
        (1.5, 0.1, -0.0, math.inf, (), []),
        [complex(0.1, -0.0), complex(math.inf, 1e-320)],
        {"key": {1: (torch.bfloat16, torch.device("cpu"), torch.strided, torch.contiguous_format)}},
        slice(1, None, 2),
    ],
)
def test_values(value: Any) -> None:
    assert repr(again(value)) == repr(value)


def test_a_number_that_is_none() -> None:
    assert math.isnan(again(math.nan))


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
    one, found, other = again([torch.ones(1, dtype=torch.uint8), tensor, X])
    assert_same(tensor, found)
    assert_same([torch.ones(1, dtype=torch.uint8), X], [one, other])
    assert found.stride() == tensor.stride()


@pytest.mark.parametrize("value", [object(), {1, 2}, nn.Linear(1, 1), torch.eye(2).to_sparse()])
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(NotPlain, match="has no place in a message"):
        CODE.write([value])


@pytest.mark.parametrize(
    ("text", "data"),
    [
        (b"", b""),
        (b"[1", b""),
        (b'["none"]', b""),
        (b'["record","Unknown",1]', b""),
        (b'["record","Nth"]', b""),
        (b'["torch","nn"]', b""),
        (b'["torch","no dtype"]', b""),
        (b'["tensor","float32",[2],[1]]', b"1234567"),
        (b'["tensor","float32",[-2],[1]]', b"12345678"),
        (b'["tensor","nn",[2],[1]]', b"12345678"),
    ],
)
def test_spoilt_bytes_are_refused(text: bytes, data: bytes) -> None:
    with pytest.raises(NotPlain):
        read(text, data)


def test_a_tensor_whose_bytes_lie_in_order_is_not_copied() -> None:
    tensor = torch.zeros(4)
    _, (memory,) = CODE.write(tensor)
    tensor += 1
    assert bytes(memory) == bytes(torch.ones(4).numpy())


def test_messages() -> None:
    value = Value.of({"x": X, "again": (X, 3)})
    forward = Forward(7, 1, value, Reading(5, 2), Autocast((("cpu", torch.bfloat16),), False), 1, True, last=True)
    found = again(forward)
    assert found._replace(value=value) == forward
    assert_same(value.tree([X]), found.value.tree(found.value.tensors))
    backward = Backward(7, 1, 1, [X, None, Addends((X, X + 1))], {3: X}, (3,), True)
    other = again(backward)
    assert isinstance(other.gradients[2], Addends)
    assert_same(list(backward), list(other))


def test_failures() -> None:
    error = ZeroDivisionError("of a layer")
    error.add_note("and a note")
    found = again(Failure(3, error))
    assert found.minibatch == 3
    assert isinstance(found.error, RemoteFailure)
    assert str(found.error) == "ZeroDivisionError: of a layer"
    assert found.error.__notes__ == ["and a note"]
    for kind in (Discarded, SettingError, torch.OutOfMemoryError):
        assert isinstance(again(Failure(3, kind("it"))).error, kind)


def test_structures_import_nothing() -> None:
    known = pytree.tree_structure((collections.OrderedDict(a=1), collections.defaultdict(list, b=[2])))
    assert again(known) == known
    with pytest.raises(NotPlain, match="a structure with Counter has no place in a message"):
        CODE.write(pytree.tree_structure(collections.defaultdict(collections.Counter, b=1)))
    enum = json.dumps({"__enum__": True, "fqn": "no_module:Name", "name": "A"})
    for part in (
        ["collections.defaultdict", {"default_factory_module": "no_module", "default_factory_name": "f"}],
        ["collections.defaultdict", {"default_factory_module": "builtins", "default_factory_name": "breakpoint"}],
        ["builtins.dict", enum],
        ["builtins.dict", json.dumps([[enum]]).replace("__enum__", r"\\u005f_enum__")],
    ):
        kind, context = part
        spec = json.dumps([1, {"type": kind, "context": context, "children_spec": []}])
        with pytest.raises(NotPlain, match=r"a structure with .* has no place in a message"):
            read(json.dumps(["spec", spec]).encode(), b"")


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (["call_function", "x", "os::system", [], {}, {}], "os::system is no operator of torch's own"),
        (["call_function", "x", "aten::save", [], {}, {}], "aten::save is no operator of torch's own"),
        (["call_function", "x", "aten::neg", [1], {"alpha=breakpoint(), z": 1}, {}], "a graph has a name 'alpha=break"),
        (["call_function", "x", "aten::neg", [Reading(1)], {}, {}], "a graph gives a Reading to what it calls"),
        (["get_attr", "x", "__class__.forward", [], {}, {}], "a graph has a name '__class__'"),
        (["placeholder", "x", "x=breakpoint()", [], {}, {}], "a graph has a name 'x=breakpoint"),
    ],
)
def test_graphs_are_no_code(node: list[Any], message: str) -> None:
    """Torch makes Python of a graph, with names as they are."""
    graph = {"nodes": [node], "held": {}}
    layer = {"name": "x", "kind": "", "device": torch.device("cpu"), "training": True, "held": {}}
    variants: dict[str, Any] = {"changes": [], "graphs": [{"own": [], "graph": graph, "regions": [], "outputs": None}]}
    with pytest.raises(NotPlain, match=message):
        layers_of_data([[{**layer, "own": [False] * 3, "variants": variants}], []])


def test_layers_without_a_graph_are_refused() -> None:
    with pytest.raises(NotPlain, match=r"layer 'net\.0' is a Linear, which has no graph"):
        layers_as_data([Layer("net.0", nn.Linear(1, 1))])
