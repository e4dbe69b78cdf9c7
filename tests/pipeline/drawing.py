"""Layers that draw random numbers, for the tests of law L7."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetpipe.pipeline.random.generators import RandomGenerators, attach


class Run(nn.Module):
    """A user's layer that runs any function of its children and its input."""

    def __init__(self, function: Callable[..., Any], *children: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.ModuleList(children)

    def forward(self, *inputs: Any) -> Any:
        return self.function(*self.inner, *inputs)


class Block(nn.Module):
    """A user's residual layer whose dropout module is used twice, and which draws on its own as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(torch.relu(self.linear(x)))
        return F.dropout(x, 0.5, self.training).add(self.dropout(x))


def draw(
    layer: nn.Module, minibatch: int, *inputs: Any, chance: RandomGenerators | None = None, path: str = "net.0"
) -> Any:
    """Runs a copy of ``layer`` and checks that the default generator is left alone."""
    run = attach(copy.deepcopy(layer), path)
    before = torch.get_rng_state()
    with (chance or RandomGenerators(7)).minibatch(minibatch):
        result = run(*inputs)
    assert torch.equal(before, torch.get_rng_state())
    return result
