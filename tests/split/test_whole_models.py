"""Models in which layers stay divided that something beside them would have made whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.split.dividing import Whole, assert_divided, divided
from tests.split.nets import WORDS, pixels, some_words
from tests.split.test_divided_operators import SEQUENCE, Then, X, conv


class Root(nn.Module):
    """Norm by root mean square, as people write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float64)
        made: Tensor = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return made


class Llama(nn.Module):
    """A block behind an embedding, whose channels the attention's layers are not divided by.

    Args:
        norm: Of what attention and gate are given.
        turns: Whether queries are multiplied by what is made under ``torch.no_grad()``.
    """

    def __init__(self, norm: nn.Module, turns: bool = True) -> None:
        super().__init__()
        self.words, self.norm, self.turns = nn.Embedding(WORDS, 8), norm, turns
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        y = self.norm(x)
        q, k, v = (each(y).view(*words.shape, 4, 2).transpose(1, 2) for each in (self.q, self.k, self.v))
        if self.turns:
            with torch.no_grad():
                angles = torch.arange(words.shape[1])[:, None].cos()
            q, k = q * angles, k * angles
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = self.norm(x)
        made: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return made


@pytest.mark.parametrize("norm", [nn.Identity(), Root(8)])
def test_attention_is_divided_by_heads_behind_a_divided_embedding(norm: nn.Module) -> None:
    """Its layers were divided by rows, as the embedding's channels are, and the attention was whole."""
    embedding, attention, gate = assert_divided(Whole(Llama(norm), some_words()), shares=(2, 1))
    assert embedding.startswith("embedding")
    assert "linear" not in embedding
    assert attention.split().count("linear") == 4
    assert "scaled_dot_product_attention" in attention
    assert gate == "linear silu linear mul linear"


class Drops(nn.Module):
    """Leaves out whole samples, by a mask that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = conv()

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.empty(len(x), 1, 1, 1, dtype=x.dtype).bernoulli_(0.5).div_(0.5)
        made: Tensor = (self.layer(x) * kept).relu()
        return made


def turned(x: Tensor) -> Tensor:
    with torch.no_grad():
        angle = torch.arange(x.shape[0]).cos()[:, None, None, None]
    return x * angle


class Crosses(nn.Module):
    """Looks at other words than its own; of one matrix, queries have the first rows, keys and values the others."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        other = x.flip(1)
        made: Tensor = self.attention(x, other, other, need_weights=False)[0]
        return made


class Einsums(nn.Module):
    """Attention by indices, with queries and keys of one length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.reshape(*x.shape[:2], 4, 2).permute(0, 2, 1, 3) for each in self.qkv(x).chunk(3, -1))
        scores = torch.einsum("bhid, bhjd -> bhij", F.normalize(q, dim=-1), F.normalize(k, dim=-1))
        y = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
        made: Tensor = self.out(y.movedim(1, 2).reshape(x.shape))
        return made


def turned_as_complex(module: nn.Module, y: Tensor) -> Tensor:
    pairs = torch.view_as_complex(y.view(*y.shape[:2], 3, 2, 2))
    heads = torch.view_as_real(pairs * torch.polar(pairs.abs() + 1, pairs.abs())).flatten(3).transpose(1, 2)
    made: Tensor = heads @ heads.mT
    return made


class Excites(nn.Module):
    """Block of a RegNet: a convolution by groups, whose channels are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.groups = conv(), nn.Conv2d(12, 12, 3, padding=1, groups=3)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.groups(self.first(x).relu())
        scale = self.excite(self.squeeze(y.mean((2, 3), keepdim=True)).relu()).sigmoid()
        made: Tensor = y * scale.expand_as(y)
        return made


weight_norm, spectral_norm = parametrizations.weight_norm, parametrizations.spectral_norm

STAYS: dict[str, tuple[nn.Module, Tensor, list[str]]] = {
    "written behind a view": (
        nn.Sequential(conv(), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(432, 5)),
        X,
        ["conv2d flatten relu linear"],
    ),
    "a mask that is written": (Drops(), X, ["conv2d mul relu"]),
    "what is made without gradients": (Then(conv(), lambda s, y: turned(y)), X, ["conv2d mul"]),
    "normed weights": (
        nn.Sequential(weight_norm(nn.Linear(8, 12)), nn.ReLU(), weight_norm(nn.Linear(12, 8))),
        SEQUENCE,
        ["linear relu linear"],
    ),
    "weights by their spectrum": (spectral_norm(conv()), X, ["conv2d"]),
    "a part of a matrix": (Crosses(), SEQUENCE, ["linear"]),
    "attention by indices": (Einsums(), SEQUENCE, ["linear split_with_sizes"]),
    "complex numbers": (Then(nn.Linear(8, 12), turned_as_complex), SEQUENCE, ["linear reshape view_as_complex"]),
    "scaled groups": (Excites(), X, ["conv2d relu conv2d mean", "conv2d relu", "conv2d sigmoid expand_as mul"]),
    "spread": (
        Then(
            conv(),
            lambda s, y: y.roll(1, -1) - y.var((2, 3), keepdim=True) + y.amax(2, keepdim=True) * y.std(3)[..., None],
        ),
        X,
        ["conv2d roll var sub amax std"],
    ),
    "the largest of each": (
        Then(conv(), lambda s, y: y.max(3)[0] + y.argmin(-1)),
        X,
        ["conv2d max getitem getitem argmin add"],
    ),
    "repeats": (
        Then(conv(), lambda s, y: y.repeat(1, 1, 2, 1).mT.masked_fill(y[:1, :1, :1, :1] > 0, 1.0)),
        X,
        ["conv2d"],
    ),
    "chosen pixels": (Then(conv(), lambda s, y: y.index_select(2, torch.tensor([3, 1]))), X, ["conv2d index_select"]),
}


@pytest.mark.parametrize("case", STAYS)
def test_no_more_regions_than_needed(case: str) -> None:
    module, given, operators = STAYS[case]
    whole = Whole(module, given)
    for shares in ((3, 1), (1, 2, 2), (0, 1)):
        regions = assert_divided(whole, shares=shares)
        assert len(regions) == len(operators), shares
        for region, begins in zip(regions, operators, strict=True):
            assert region.startswith(begins), shares


def test_layers_are_named_by_their_path_whatever_their_weight_is_made_of() -> None:
    for case, layers in {
        "normed weights": {"net.0": (12,), "net.2": (8, 12)},
        "weights by their spectrum": {"net": (12,)},
        "a part of a matrix": {"net.attention.in_proj_weight": (4, 8, 16), "net.attention.out_proj": (8, 4)},
    }.items():
        module, given, _ = STAYS[case]
        with divided(Whole(module, given)) as both:
            assert both.segment.divisible == layers
    module, given, _ = STAYS["normed weights"]
    assert assert_divided(Whole(module, given), counts={"net.0": (5, 7)}) == ["linear relu linear"]


def test_another_dtype_needs_no_whole() -> None:
    """An export checks what it was before."""
    with divided(Whole(Then(conv(), lambda s, y: y.to(torch.float32).relu()), X)) as both:
        ((_, _, (call,)),) = both.segment._variants.values()
        assert [output.node.name for output in call.region.outputs] == ["relu_default"]


def test_what_is_seen_by_another_view_is_written() -> None:
    """Half of the channels are changed in place, and all are used afterwards."""

    def halves(module: nn.Module, y: Tensor) -> Tensor:
        y.flatten(2)[:, :6].mul_(3)
        return y.relu()

    assert assert_divided(Whole(Then(conv(), halves), X)) == []


def test_a_region_without_gradients_that_writes() -> None:
    class Counts(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = conv()
            self.register_buffer("seen", torch.zeros(12, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            with torch.no_grad():
                self.seen.add_(y.mean((0, 2, 3))[:, None, None])
            made: Tensor = y - self.seen
            return made

    assert_divided(Whole(Counts(), X))


def test_one_transfer_is_enough() -> None:
    """A value that is put together, and what little work makes of it."""
    net = Then(conv(), lambda s, y: torch.cat([y.softmax(1), y.relu().softmax(1)], 1))
    assert assert_divided(Whole(net, pixels(2, 4, 6, 6))) == ["conv2d"]
