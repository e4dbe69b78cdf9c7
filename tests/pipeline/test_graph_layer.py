"""A layer of a captured model holds tensors by their paths there, whatever they are called."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_hetpipe.pipeline import graph_layer
from lightning_hetpipe.pipeline.graph_layer import GraphLayer, LayerGraph, here
from tests.support.accelerator import NAME

PATHS = ["take", "held", "code", "device", "training", "forward", "register_buffer", "_parameters", "block.0.weight"]


def doubling(device: torch.device, own: Tensor, given: Tensor) -> Any:
    return (given * own * 2,)


def layer_of(path: str, tensor: Tensor) -> GraphLayer:
    layer = GraphLayer(torch.device("cpu"))
    layer.take({path: tensor})
    layer.code.add(LayerGraph(fx.symbolic_trace(doubling), []), [path], [path])
    return layer


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor.clone])
def test_a_tensor_may_be_called_like_an_attribute_of_the_layer(path: str, kind: Any) -> None:
    tensor = kind(torch.tensor([2.0, 3.0]))
    layer = layer_of(path, tensor)
    assert layer.held(path) is tensor
    assert layer.training is True
    assert layer.device == torch.device("cpu")
    for each in (layer, copy.deepcopy(layer)):
        variant, result = each((0, torch.tensor([1.0, 10.0])))
        assert variant == 0
        assert result.tolist() == [4.0, 60.0]


@pytest.mark.parametrize("path", PATHS)
def test_what_it_does_not_hold(path: str) -> None:
    """Not even where it has an attribute of that name."""
    assert GraphLayer(torch.device("cpu")).held(path) is None


def test_it_takes_others() -> None:
    layer = layer_of("take", nn.Parameter(torch.ones(2)))
    other = torch.zeros(2)
    layer.take({"held": other})
    assert layer.held("take") is None
    assert layer.held("held") is other
    assert list(layer.parameters()) == []


def test_paths_with_dots_do_not_meet_those_without() -> None:
    layer = GraphLayer(torch.device("cpu"))
    one, two = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    layer.take({"a.b": one, "a_b": two})
    assert layer.held("a.b") is one
    assert layer.held("a_b") is two


def test_it_follows_what_changes() -> None:
    """Tensors that are replaced, constants of another device that are changed in place, and code that is new."""
    held, constant = torch.tensor([2.0]), torch.tensor([3.0])
    layers = [layer_of("held", held), GraphLayer(torch.device("cpu:0"))]  # `to("cpu:0")` copies
    layers[1].code.add(LayerGraph(fx.symbolic_trace(doubling), []), [constant], [])
    forwards, given = [layer.forward for layer in layers], (0, torch.tensor([1.0]))

    def expect(value: float) -> None:
        current: Any = given
        for forward in forwards:
            current = forward(current)
        assert current[1].item() == value

    expect(24.0)
    constant.fill_(5.0)
    expect(40.0)
    layers[0].take({"held": torch.tensor([4.0])})
    expect(80.0)
    owns: list[str | Tensor] = ["held", constant]
    for layer, own in zip(layers, owns, strict=True):
        layer.code.clear()
        layer.code.add(LayerGraph(fx.symbolic_trace(adding), []), [own], [])
    expect(10.0)


def adding(device: torch.device, own: Tensor, given: Tensor) -> Any:
    return (given + own,)


@pytest.mark.usefixtures("accelerator")
def test_a_region_that_a_thread_of_autograds_computes_again_is_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one for each, in which no layer runs: a checkpointed region would make its tensors on the host."""
    asked: list[torch.device] = []

    def ask() -> None:
        torch.accelerator.set_device_index(1)
        asked.append(here())

    for initialized in (True, False):
        monkeypatch.setattr(graph_layer, "is_initialized", lambda is_so=initialized: is_so)
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(10)
    assert asked == [torch.device(NAME, 1), torch.device("cpu")]
