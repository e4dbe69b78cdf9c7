"""A module that lies on several devices is captured as if it lay on one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.captured import on_one_device
from lightning_hetpipe.capture.export import graph_of
from tests.support.captured_models import GPT, ResNet
from tests.support.marks import quick
from tests.support.models import WORDS

CPU = torch.device("cpu")


def resnet() -> tuple[nn.Module, nn.Module, Tensor]:
    model = ResNet()
    return model, model.layers[1], torch.randn(2, 1, 5, 5)


def gpt() -> tuple[nn.Module, nn.Module, Tensor]:
    model = GPT()
    return model, model.blocks, torch.randint(WORDS, (2, 6))


@quick("resnet")
@pytest.mark.parametrize("make", [resnet, gpt])
def test_the_graph_is_the_same(make: Callable[[], tuple[nn.Module, nn.Module, Tensor]]) -> None:
    model, part, x = make()
    expected = str(graph_of("model", model, (x,), {})[0].graph)
    part.to("meta")  # a device that cannot compute anything
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with on_one_device(model, CPU):
        assert str(graph_of("model", model, (x,), {})[0].graph) == expected
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(after) == list(tensors)
    assert all(after[name] is tensor for name, tensor in tensors.items())


def test_ties_and_what_is_frozen_stay() -> None:
    model = GPT()
    model.words.requires_grad_(False)
    model.to("meta")
    model.head.weight = model.words.weight  # that move unties them
    with on_one_device(model, CPU):
        one, other = model.head.weight, model.words.weight
        # Looked at one by one: printing a tensor without memory, as a failing assert does, crashes.
        tied, place, trained = one is other, one.device, one.requires_grad
        with pytest.raises(RuntimeError, match="data pointer"):  # there is none
            one.untyped_storage().data_ptr()
        kind = type(one)
    assert (tied, place, trained, kind) == (True, CPU, False, nn.Parameter)
    assert model.head.weight is model.words.weight
    assert model.head.weight.device.type == "meta"
