"""A layer makes its tensors where it is, not where it was captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.captured import Captured
from lightning_hetpipe.capture.effects import FrozenValues
from lightning_hetpipe.pipeline.weight_stash import copy_of
from tests.support.captured_models import GPT, ResNet
from tests.support.marks import quick
from tests.support.models import WORDS

META = torch.device("meta")  # the one other device that every machine has: it computes shapes only


class Makes(nn.Module):
    """Makes tensors, in a region of its own too, and holds a constant that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.constant = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x) + torch.zeros(3, device=x.device) + torch.arange(3, device=x.device)
        y = y + self.constant
        with torch.no_grad():
            scale = torch.full((3,), 2.0, device=x.device)
        z: Tensor = self.two(y * scale + torch.tensor([1.0, 2.0, 3.0], device=x.device))
        return z


CASES: dict[str, tuple[Any, Tensor]] = {
    "gpt": (GPT, torch.randint(WORDS, (2, 6))),
    "resnet": (ResNet, torch.randn(2, 1, 5, 5)),
    "makes": (Makes, torch.randn(2, 3)),
}


@quick("resnet", "makes")
@pytest.mark.parametrize("name", CASES)
def test_layers_run_on_another_device(name: str) -> None:
    make, x = CASES[name]
    module = make()
    captured = Captured("model", module, (x,), {}, FrozenValues(module))
    value: Any = captured.value((x,), {})
    moved: Any = tuple(part.to(META) if isinstance(part, Tensor) else part for part in value)
    for layer in captured.layers:
        value, moved = layer.module(value), copy_of(layer.module, META)(moved)
    assert moved.device == META
    assert moved.shape == value.shape
