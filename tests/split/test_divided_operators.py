"""Each operator of a divided layer gives what the unsplit one does, in float64, and is divided as its rule says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.split.dividing import Whole, assert_divided


def images(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(1))


class Then(nn.Module):
    """A layer, and what a function makes of its output; the function is given the module."""

    def __init__(self, layer: nn.Module, then: Callable[[Any, Tensor], Tensor], **others: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.then = then
        for name, each in others.items():
            setattr(self, name, each)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.then(self, self.layer(x))
        return made


def conv(channels: int = 12, **settings: Any) -> nn.Conv2d:
    return nn.Conv2d(4, channels, 3, padding=1, **settings)


X = images(2, 4, 6, 6)
SEQUENCE = images(2, 5, 8)

STAYS: dict[str, tuple[nn.Module, Tensor, str]] = {
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, dilation=2), images(2, 4, 12), "conv1d"),
    "conv2d": (conv(bias=False), X, "conv2d"),
    "conv2d, same padding": (nn.Conv2d(4, 6, 3, padding="same"), X, "conv2d"),
    "conv3d": (nn.Conv3d(2, 5, 3), images(2, 2, 4, 4, 4), "conv3d"),
    "conv of one image": (nn.Conv2d(4, 6, 3), images(4, 6, 6), "conv2d"),
    "transposed conv": (nn.ConvTranspose2d(4, 6, 2, stride=2), X, "conv_transpose2d"),
    "groups": (nn.Conv2d(4, 12, 3, groups=4), X, "conv2d"),
    "depthwise": (Then(conv(8), lambda s, y: s.depth(y), depth=nn.Conv2d(8, 16, 3, groups=8)), X, "conv2d conv2d"),
    "groups of several": (
        Then(conv(8), lambda s, y: s.grouped(y), grouped=nn.Conv2d(8, 12, 3, groups=4)),
        X,
        "conv2d conv2d",
    ),
    "batch norm": (Then(conv(), lambda s, y: s.norm(y).relu(), norm=nn.BatchNorm2d(12)), X, "conv2d batch_norm relu"),
    "batch norm of vectors": (
        nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh()),
        images(4, 8),
        "linear batch_norm tanh",
    ),
    "instance norm": (
        Then(conv(), lambda s, y: s.norm(y), norm=nn.InstanceNorm2d(12, affine=True, track_running_stats=True)),
        X,
        "conv2d instance_norm",
    ),
    "group norm": (Then(conv(), lambda s, y: s.norm(y), norm=nn.GroupNorm(4, 12)), X, "conv2d group_norm"),
    "prelu": (Then(conv(), lambda s, y: s.act(y), act=nn.PReLU(12)), X, "conv2d prelu"),
    "prelu of one number": (Then(conv(), lambda s, y: s.act(y), act=nn.PReLU()), X, "conv2d prelu"),
    "pooling": (
        Then(conv(), lambda s, y: F.avg_pool2d(F.max_pool2d(y, 2), 2)),
        X,
        "conv2d max_pool2d avg_pool2d",
    ),
    "pooling to a size": (
        Then(conv(), lambda s, y: F.adaptive_avg_pool2d(y, 2) + F.adaptive_max_pool2d(y, 2)),
        X,
        "conv2d adaptive_avg_pool2d adaptive_max_pool2d getitem getitem add",
    ),
    "resizing and padding": (
        Then(conv(), lambda s, y: F.pad(F.interpolate(y, scale_factor=2), (1, 1))),
        X,
        "conv2d upsample_nearest2d pad",
    ),
    "in place": (
        Then(conv(), lambda s, y: y.mul_(2).add_(1).clamp_(max=3)),
        X,
        "conv2d mul add clamp",
    ),
    "elementwise": (
        Then(conv(), lambda s, y: torch.where(y > 0, F.gelu(y) + 1, F.silu(y) * y.abs().sqrt())),
        X,
        "conv2d gt gelu add silu abs sqrt mul where",
    ),
    "means": (Then(conv(), lambda s, y: y.mean((2, 3)) + y.amax((-1, -2)) + y.sum(3).sum(-1)), X, "conv2d mean"),
    "softmax over pixels": (Then(conv(), lambda s, y: y.flatten(2).softmax(-1)), X, "conv2d flatten softmax"),
    "dropout": (Then(conv(), lambda s, y: s.drop(y), drop=nn.Dropout(0.4)), X, "conv2d type_as mul"),
    "dropout of channels": (Then(conv(), lambda s, y: s.drop(y), drop=nn.Dropout2d(0.4)), X, "conv2d type_as mul"),
    "a part of the pixels": (Then(conv(), lambda s, y: y[:, :, 1:3].transpose(2, 3).contiguous()), X, "conv2d slice"),
    "cat of likes": (Then(conv(), lambda s, y: torch.cat([y, y.relu()], 3)), X, "conv2d relu cat"),
    "stack of likes": (Then(conv(), lambda s, y: torch.stack([y, y.tanh()]).sum(0)), X, "conv2d tanh stack sum"),
    "views": (Then(conv(), lambda s, y: y.view(2, 12, 36).unsqueeze(0).squeeze(0)), X, "conv2d reshape unsqueeze"),
    "expanding": (Then(conv(), lambda s, y: y[:, :, :1].expand(2, 12, 5, 6)), X, "conv2d slice expand"),
    "a scale for each": (
        Then(nn.Linear(8, 6), lambda s, y: y * s.scale.weight[0], scale=nn.Embedding(1, 6)),
        SEQUENCE,
        "linear mul",
    ),
    "linear": (nn.Linear(8, 6), SEQUENCE, "linear"),
    "rows": (
        Then(nn.Linear(8, 12), lambda s, y: s.second(F.gelu(y)), second=nn.Linear(12, 8)),
        SEQUENCE,
        "linear gelu linear",
    ),
    "rows without a bias": (
        nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8, bias=False)),
        SEQUENCE,
        "linear relu linear",
    ),
    "flattened before rows": (
        nn.Sequential(conv(), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 36, 5)),
        X,
        "conv2d relu flatten linear",
    ),
    "norm over pixels": (Then(conv(), lambda s, y: s.norm(y), norm=nn.LayerNorm(6)), X, "conv2d layer_norm"),
    "gate": (
        Then(
            nn.Linear(8, 24),
            lambda s, y: torch.mul(*y.chunk(2, -1)),
        ),
        SEQUENCE,
        "linear split_with_sizes getitem getitem mul",
    ),
    "products": (
        Then(
            nn.Linear(8, 12), lambda s, y: y.view(2, 5, 3, 4).transpose(1, 2) @ y.view(2, 5, 3, 4).permute(0, 2, 3, 1)
        ),
        SEQUENCE,
        "linear reshape transpose reshape permute matmul",
    ),
}


@pytest.mark.parametrize("case", STAYS)
def test_what_stays_divided(case: str) -> None:
    module, given, operators = STAYS[case]
    whole = Whole(module, given)
    for shares in ((3, 1), (1, 2, 2), (0, 1), (1, 0, 1)):
        (region, *others) = assert_divided(whole, shares=shares)
        assert region.startswith(operators), shares
        assert not others, shares


GATHERS: dict[str, tuple[nn.Module, Tensor]] = {
    "layer norm": (nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8)), SEQUENCE),
    "local response norm": (nn.Sequential(conv(), nn.LocalResponseNorm(3), nn.Conv2d(12, 4, 1)), X),
    "softmax over channels": (Then(conv(), lambda s, y: s.last(y.softmax(1)), last=nn.Conv2d(12, 4, 1)), X),
    "pixel shuffle": (nn.Sequential(conv(), nn.PixelShuffle(2), nn.Conv2d(3, 4, 1)), X),
    "cat of channels": (Then(conv(), lambda s, y: s.last(torch.cat([y, y.relu()], 1)), last=nn.Conv2d(24, 4, 1)), X),
    "sums of unlikes": (
        Then(conv(), lambda s, y: s.last(y.flip(1) + y), last=nn.Conv2d(12, 4, 1)),
        X,
    ),
    "a group norm of other groups": (
        Then(
            conv(),
            lambda s, y: s.last(s.norm(s.grouped(y))),
            norm=nn.GroupNorm(3, 12),
            last=nn.Conv2d(12, 4, 1),
            grouped=nn.Conv2d(12, 12, 1, groups=4),
        ),
        X,
    ),
    "mean over channels": (Then(conv(), lambda s, y: s.last(y - y.mean(1, keepdim=True)), last=nn.Conv2d(12, 4, 1)), X),
    "convolutions": (nn.Sequential(conv(), nn.ReLU(), nn.Conv2d(12, 4, 1)), X),
    "a view into others": (
        Then(nn.Linear(8, 12), lambda s, y: s.last(y.reshape(2, 15, 4)), last=nn.Linear(4, 3)),
        SEQUENCE,
    ),
}


@pytest.mark.parametrize("case", GATHERS)
def test_what_is_made_whole(case: str) -> None:
    module, given = GATHERS[case]
    whole = Whole(module, given)
    for shares in ((3, 1), (1, 2, 2), (0, 1)):
        assert len(assert_divided(whole, shares=shares)) >= 2, shares


class Views(nn.Module):
    """Writes into a view of a layer's output, and looks at the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = conv(), nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y[:, :3].mul_(2)
        made: Tensor = self.last(y.relu())
        return made


def test_what_is_written_into_is_whole() -> None:
    assert assert_divided(Whole(Views(), X)) == ["conv2d"]  # the second one


class Twice(nn.Module):
    """One batch norm, and one convolution, for two values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.both, self.norm = conv(), nn.Conv2d(12, 12, 1), nn.BatchNorm2d(12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.both(self.first(x)))
        made: Tensor = self.norm(self.both(y.relu())) + y
        return made


def test_a_layer_that_is_called_twice() -> None:
    assert_divided(Whole(Twice(), X), shares=(2, 1))


def test_the_home_is_any_member() -> None:
    module, given, _ = STAYS["batch norm"]
    assert_divided(Whole(module, given), shares=(1, 2, 1), home=2)


def test_little_work_is_not_shared_out() -> None:
    """Members would be called for an addition, of what is whole on both sides."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.first, self.second = nn.Embedding(7, 8), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, words: Tensor) -> Tensor:
            x = self.words(words)
            made: Tensor = (x + self.second(self.first(F.layer_norm(x, (8,))).relu())).exp()
            return made

    regions = assert_divided(Whole(Residual(), torch.randint(7, (2, 5))))
    assert regions == ["embedding", "linear relu linear"]


class Added(nn.Module):
    """A product with a weight, added to what each row has of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.rows = nn.Parameter(torch.randn(8, 12)), nn.Linear(8, channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.rows(x).tanh(), x, self.weight)


@pytest.mark.parametrize("channels", [12, 1])
def test_what_a_product_is_added_to_may_have_rows(channels: int) -> None:
    assert_divided(Whole(Added(channels), images(5, 8)), shares=(1, 2))


class HiddenRows(nn.Module):
    """Attention with dropout in which the first words, of padding, may look at nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, 2)).transpose(1, 2) for each in self.qkv(x).split(8, 2))
        mask = torch.ones(5, 5, dtype=torch.bool).tril() & (torch.arange(5) >= 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.3)


def test_attention_with_dropout_of_rows_that_see_nothing() -> None:
    (region,) = assert_divided(Whole(HiddenRows(), SEQUENCE))
    assert "_safe_softmax type_as mul matmul" in region


def test_one_channel_for_all_others() -> None:
    """A plan may give it to another member than the home."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = x * self.gate(x).sigmoid()
            return made

    assert_divided(Whole(Gate(), SEQUENCE), shares=(1, 1), counts={"net.gate": (0, 1)})
