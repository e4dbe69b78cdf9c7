"""A graph's nodes make up layers by their blocks; what is changed in place is not cut from what changes it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.export import graph_of
from lightning_hetpipe.capture.grouping import LayerNodes, alike, changed_buffers, groups
from tests.support.captured_models import CLIP, GPT, ResNet, Translator, UNet

IMAGE, IDS = torch.randn(2, 1, 5, 5), torch.randint(5, (2, 6))


def blocks(module: nn.Module, *args: Tensor, **kwargs: Tensor) -> list[str | None]:
    return [group.block for group in groups(graph_of("model", module, args, kwargs)[0].graph, module)]


def test_blocks_are_the_modules_that_hold_no_list_of_others() -> None:
    assert blocks(GPT(blocks=2), IDS) == ["words", "places", "blocks.0", "blocks.1", "norm", "head"]
    assert blocks(Translator(encoders=1), IDS, target=IDS) == [
        "words",
        "encoder.0",
        "words",
        "decoder.0",
        "decoder.1",
        "norm",
    ]
    assert blocks(CLIP(), torch.randn(3, 4), text=torch.randn(3, 2)) == ["image", "text"]
    assert blocks(UNet(), torch.randn(3, 6)) == ["down1", "down2", "middle", "up2", "up1", "head"]
    assert blocks(nn.Linear(3, 3), torch.randn(2, 3)) == [""]


def parts(module: nn.Module, *args: Tensor) -> list[str]:
    return [group.part for group in groups(graph_of("model", module, args, {})[0].graph, module)]


def test_a_sequential_inside_a_block_is_part_of_it() -> None:
    """As the MLP in nanoGPT's blocks, and the downsampling in torchvision's. In a Sequential blocks are split."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(3), nn.Sequential(nn.Linear(3, 6), nn.GELU(), nn.Linear(6, 3))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.mlp(self.norm(x))
            return y

    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
            self.first, self.second = nn.Sequential(Block(), Block()), nn.ModuleList([Block()])

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(self.stem(x))
            for block in self.second:
                x = block(x)
            return x

    first = ["first.0.norm", "first.0.mlp.0", "first.0.mlp.2", "first.1.norm", "first.1.mlp.0", "first.1.mlp.2"]
    assert parts(Stages(), torch.randn(2, 3)) == ["stem.0", "stem.1", *first, "second.0"]
    assert blocks(Stages(), torch.randn(2, 3)) == ["stem.0", "stem.1", *["first.0"] * 3, *["first.1"] * 3, "second.0"]


def test_a_change_in_place_joins_layers() -> None:
    """conv1, bn1 and their in-place ReLU are one layer, as the ReLU changes what bn1 gives."""
    found = blocks(ResNet(blocks=2), IMAGE)
    assert found == ["conv1", "bn1", "layers.0", "layers.1", "fc"]

    class Changes(nn.Module):
        def __init__(self, view: bool) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.view = view

        def forward(self, x: Tensor) -> Tensor:
            a = self.one(x)
            b = self.two(x)
            part = a[:, :2] if self.view else a.clone()
            part.mul_(2.0)
            y: Tensor = self.three(a + b)
            return y

    assert blocks(Changes(view=False), torch.randn(2, 3)) == ["one", "two", "three"]
    assert blocks(Changes(view=True), torch.randn(2, 3)) == ["one", "three"]


class Gated(nn.Module):
    """Computes with a weight of its own before its children, and adds after them."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.relu = nn.ReLU(in_place)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.two(self.relu(self.one(x * self.gain)))
        return y


def nodes(module: nn.Module, *args: Tensor) -> list[tuple[str, list[str]]]:
    found = groups(graph_of("model", module, args, {})[0].graph, module)
    return [(group.part, [str(node.target).split(".")[1] for node in group.nodes]) for group in found]


def test_a_block_in_a_sequential_is_split_between_its_children() -> None:
    """A first child takes what its block computes before it, which does not stay with the block before."""
    assert nodes(nn.Sequential(Gated(), nn.Tanh(), nn.Sequential(Gated())), torch.randn(2, 3)) == [
        ("0.one", ["mul", "linear", "relu"]),
        ("0.two", ["linear", "add"]),
        ("1", ["tanh"]),
        ("2.0.one", ["mul", "linear", "relu"]),
        ("2.0.two", ["linear", "add"]),
    ]


def test_a_sequential_with_one_module_of_several_layers_is_no_list_of_blocks() -> None:
    """As a norm, attention and dropout in the demo's GPT."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.Sequential(nn.LayerNorm(3), Gated(), nn.Dropout(0.0))
            self.think = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.think(x + self.attend(x))
            return y

    found = parts(nn.Sequential(Attends(), nn.Linear(3, 3)), torch.randn(2, 3))
    assert found == ["0.attend.0", "0.attend.1", "0.think.0", "0.think.2", "1"]


def test_blocks_in_a_sequential_that_are_not_split() -> None:
    """One with a single child, torch.nn's own, and one in a list inside of it."""

    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Gated(), Gated()])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.body(x) + x
            return y

    net = nn.Sequential(One(), nn.TransformerEncoderLayer(3, 1, 3, batch_first=True), Lists())
    assert parts(net, torch.randn(2, 2, 3)) == ["0", "1", "2.blocks.0", "2.blocks.1"]


def test_a_block_that_stands_in_two_places_is_not_split() -> None:
    """torch.export gives the paths of its children in it, and not those in the whole."""
    gated = Gated()
    assert parts(nn.Sequential(gated, nn.Tanh(), gated), torch.randn(2, 3)) == ["0", "1", "0"]


def test_a_block_whose_children_another_graph_does_not_run() -> None:
    class Skips(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else x * self.gain

    net = nn.Sequential(Skips(), Skips())
    graph = groups(graph_of("model", net.eval(), (torch.randn(2, 3),), {})[0].graph, net)
    assert [group.part for group in graph] == ["0", "1"]
    aligned = alike(graph, ["0.one", "0.two", "1.one", "1.two"])
    assert aligned is None or [len(group.nodes) for group in aligned] == [1, 0, 1, 0]


def test_a_buffer_that_is_changed_is_in_one_layer() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.calls: Tensor
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x) * self.calls
            x = self.two(x)
            self.calls.add_(1)
            y: Tensor = self.three(x)
            return y

    assert blocks(Counts(), torch.randn(2, 3)) == ["one", "three"]


class Follows(nn.Module):
    """Follows the mean of its inputs, in place and without gradients, between two layers."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        with torch.no_grad():
            self.mean[:].lerp_(x.mean(0), 0.1)
        y: Tensor = self.two(x) * self.mean
        return y


def test_a_buffer_that_is_changed_in_a_region_of_its_own() -> None:
    """Code under torch.no_grad() is one node, which was not seen to change anything."""
    net = Follows()
    found = groups(graph_of("model", net, (torch.randn(2, 3),), {})[0].graph, net)
    assert [group.block for group in found] == ["one"]
    assert list(changed_buffers(found[0].nodes)) == ["mean"]


def test_batchnorm_that_is_called_twice_is_in_one_layer() -> None:
    """It changes its statistics without saying so."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(self.two(self.norm(self.one(x))))
            return y

    assert blocks(Twice(), torch.randn(4, 3)) == ["one", "norm"]


# Another graph of the same module.


def cut(*calls: str, like: list[str | None]) -> list[tuple[str | None, int]] | None:
    found = [LayerNodes(call, [cast(Any, index)]) for index, call in enumerate(calls)]
    aligned = alike(found, like)
    return None if aligned is None else [(group.call, len(group.nodes)) for group in aligned]


def test_another_graph_is_cut_alike() -> None:
    assert cut("a", "b", "c", like=["a", "b", "c"]) == [("a", 1), ("b", 1), ("c", 1)]
    assert cut("a", "b", "c", like=["a", "c"]) == [("a", 2), ("c", 1)]
    assert cut("a", "c", like=["a", "b", "c", "d"]) == [("a", 1), ("b", 0), ("c", 1), ("d", 0)]
    assert cut("a", "b@1", "a", like=["a", "b"]) == [("a", 3), ("b", 0)]
    assert cut("b", like=["a", "b"]) == [("a", 0), ("b", 1)]
    assert cut("x", "b", like=["a", "b"]) is None
