"""Random nets of convolutions, norms, residuals, shared and in-place modules, divided by random shares."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.split.dividing import Whole, assert_divided
from tests.support.marks import explores

WIDTH = 6

Step = Callable[["Random", Tensor, list[Tensor]], Tensor]
"""Takes the net, the value, and all values before; gives the next value, with as many channels."""


class Random(nn.Module):
    """Applies ``steps`` to images one after the other."""

    def __init__(self, steps: list[str], ending: str) -> None:
        super().__init__()
        self.steps, self.ending = steps, ending
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.shared, self.shared_norm = nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH)
        self.own = nn.ModuleList([MODULES[step]() if step in MODULES else nn.Identity() for step in steps])
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        values = [self.stem(x)]
        for step, module in zip(self.steps, self.own, strict=True):
            apply = STEPS.get(step)
            values.append(module(values[-1]) if apply is None else apply(self, values[-1], values[:-1]))
        y: Tensor = values[-1]
        if self.ending == "pixels":
            return y
        made: Tensor = self.second(F.gelu(self.first(y.mean((2, 3)))))
        return made


MODULES: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
    "grouped": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=2),
    "depthwise": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False),
    "batch norm": lambda: nn.BatchNorm2d(WIDTH),
    "group norm": lambda: nn.GroupNorm(3, WIDTH),
    "instance norm": lambda: nn.InstanceNorm2d(WIDTH, affine=True),
    "relu in place": lambda: nn.ReLU(inplace=True),
    "gelu": lambda: nn.GELU(),
    "prelu": lambda: nn.PReLU(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "channel dropout": lambda: nn.Dropout2d(0.3),
    "pool": lambda: nn.AvgPool2d(3, 1, 1),
    "layer norm": lambda: nn.LayerNorm([WIDTH, 6, 6]),
    "response norm": lambda: nn.LocalResponseNorm(2),
}
STEPS: dict[str, Step] = {
    "residual": lambda net, x, before: x + (before[0] if before else x),
    "late residual": lambda net, x, before: x * 0.5 + (before[-1] if before else x).tanh(),
    "shared": lambda net, x, before: net.shared(x),
    "shared norm": lambda net, x, before: net.shared_norm(x),
    "cat": lambda net, x, before: torch.cat([x[:, 3:], x[:, :3]], 1),
    "channels last": lambda net, x, before: x.permute(0, 2, 3, 1).softmax(1).permute(0, 3, 1, 2),
    "softmax": lambda net, x, before: x.softmax(1),
    "scaled": lambda net, x, before: x * torch.sigmoid(net.shared(x.mean((2, 3), keepdim=True))),
    "flattened": lambda net, x, before: x.flatten(2).transpose(1, 2).reshape(len(x), 6, 6, WIDTH).permute(0, 3, 1, 2),
    "added in place": lambda net, x, before: x.cos().add_(1).mul_(0.1),
}


@explores(24)
@given(st.data())
def test_random_nets(data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.sampled_from([*MODULES, *STEPS]), min_size=1, max_size=8))
    members = data.draw(st.integers(2, 3))
    shares = data.draw(st.lists(st.integers(0, 3), min_size=members, max_size=members).filter(any))
    ending, home = data.draw(st.sampled_from(["pixels", "vectors"])), data.draw(st.integers(0, members - 1))
    torch.manual_seed(data.draw(st.integers(0, 100)))
    try:
        Random(steps, ending)(torch.randn(2, 3, 6, 6)).sum().backward()
    except RuntimeError:  # something is changed in place that autograd needs
        reject()
    assert_divided(Whole(Random(steps, ending), torch.randn(2, 3, 6, 6)), shares=shares, home=home)
