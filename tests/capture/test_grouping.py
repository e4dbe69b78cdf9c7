"""A graph's nodes make up layers by their blocks; what is changed in place is not cut from what changes it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.export import graph_of
from lightning_hetpipe.capture.grouping import LayerNodes, alike, groups
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


def test_a_sequential_inside_a_block_is_part_of_it() -> None:
    """As the MLP in nanoGPT's blocks, and the downsampling in torchvision's."""

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

    assert blocks(Stages(), torch.randn(2, 3)) == ["stem.0", "stem.1", "first.0", "first.1", "second.0"]


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
