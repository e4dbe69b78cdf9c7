"""Sequentials of the user's modules have a graph where that can be made, and else their children as layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hetpipe.capture.grouping import has_users_layers, is_torchs_own, shares_draws
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.capture.watch import TrainingWatch
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from tests.capture.test_piece_search import Decides, Leaf
from tests.capture.test_watch import Watched, X, names, run_net


class Block(nn.Module):
    """Two layers with dropout, and what ``change`` does around them."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 4)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return x + self.change(self.two(self.drop(self.one(x))))


def watched(net: nn.Module, changed_later: Callable[[nn.Module], str | None] = lambda layer: None) -> TrainingWatch:
    module = Watched(run_net, net=net)
    watch = TrainingWatch(module, None, RandomGenerators(0), 1, changed_later=changed_later)
    with watch.watching():
        loss = module.training_step(X)
    watch.check(loss)
    return watch


def test_what_is_torchs_own() -> None:
    assert is_torchs_own(nn.TransformerEncoderLayer(4, 2))
    assert is_torchs_own(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    assert not is_torchs_own(nn.ModuleList([nn.Linear(4, 4), Block()]))


def test_which_sequentials_are_the_users() -> None:
    class Own(nn.Sequential):
        """A class of its own with the same code."""

    assert not has_users_layers(nn.Sequential(nn.Linear(4, 4), Own(nn.Tanh(), nn.Linear(4, 4))))
    assert has_users_layers(nn.Sequential(nn.Linear(4, 4), Own(nn.Tanh(), Block())))


def test_a_module_in_two_layers_that_may_draw() -> None:
    """Random numbers are named by the layer, which a graph does not know."""
    block, linear, dropout = Block(), nn.Linear(4, 4), nn.Dropout(0.2)
    assert not shares_draws(nn.Sequential(Block(), linear, nn.Tanh(), linear))
    assert shares_draws(nn.Sequential(block, nn.Tanh(), block))
    assert shares_draws(nn.Sequential(dropout, Block(), dropout))
    first, second = Block(), Block()
    second.drop = first.drop
    assert shares_draws(nn.Sequential(first, second))
    assert names(watched(nn.Sequential(block, nn.Tanh(), block)).pieces[0]) == ["net.0", "net.1", "net.2"]


def test_layers_begin_inside_of_blocks() -> None:
    watch = watched(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Block(), nn.Tanh()), nn.Linear(4, 2)))
    (piece,) = watch.pieces
    assert names(piece) == ["net.0", "net.1.0.one", "net.1.0.two", "net.1.1", "net.2"]
    assert [layer.kind for layer in piece.layers] == ["Linear", "Linear", "Linear", "Tanh", "Linear"]
    assert [len(inputs) for inputs in piece.inputs] == [5]
    assert watch.without_graph == []


def test_a_sequential_of_torchs_own_has_no_graph() -> None:
    (piece,) = watched(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))).pieces
    assert piece.captured is None
    assert names(piece) == ["net.0", "net.1.0", "net.1.1"]


def test_random_numbers_are_the_same_with_and_without_a_graph() -> None:
    net = nn.Sequential(nn.Dropout(0.2), Block(), nn.Sequential(Block(), nn.Dropout(0.4)))
    generators = RandomGenerators(3)
    module = Watched(run_net, net=net)
    watch = TrainingWatch(module, None, generators, 5)
    with watch.watching():
        loss = module.training_step(X)
    watch.check(loss)
    (piece,) = watch.pieces
    assert piece.captured is not None
    value = piece.value((X,), {})
    with generators.minibatch(5):
        for layer in piece.layers:
            value = layer.module(value)
    assert torch.equal(value.sum(), loss)
    assert torch.equal(Piece("net", net).run(generators, 5, (X,), {}).sum(), loss)
    assert not torch.equal(Piece("net", net).run(generators, 6, (X,), {}).sum(), loss)


# Where there is no graph.


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Averages(nn.Module):
    """Replaces a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + x.detach().mean(0)
        return x + self.mean


def doubled(x: Tensor) -> Tensor:
    y: Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return y


def checkpointed(x: Tensor) -> Tensor:
    y: Tensor = checkpoint(torch.tanh, x, use_reentrant=False)
    return y


def through_numpy(x: Tensor) -> Tensor:
    return x * torch.from_numpy(x.detach().numpy())


def decides(x: Tensor) -> Tensor:
    """There would be a graph for each answer, and more than eight refused, where children can always run."""
    return -x if x.isnan().any() else x


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (lambda: Block(doubled), "because 'net.1' has a backward pass of its own, the torch.autograd.Function Doubled"),
        (lambda: Block(checkpointed), "layer 'net.1' calls torch.utils.checkpoint, which a graph would leave out"),
        (
            lambda: Block(decides),
            "because 'net' decides by the values of its data what to compute at test_sequentials.py",
        ),
        (lambda: Block(through_numpy), "because (in its layer 'net.1') 'net' cannot be captured by torch.export"),
        (Averages, "because 'net' puts another tensor in the place of its buffer 'net.1.mean' in forward"),
        (lambda: nn.BatchNorm1d(4, momentum=None), "'net.1' is a BatchNorm1d with momentum=None"),
    ],
)
def test_children_as_they_are_and_a_line_that_says_why(block: Callable[[], nn.Module], why: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), block(), Block(), nn.Linear(4, 2))
    watch = watched(net)
    (piece,) = watch.pieces
    assert piece.captured is None
    assert [layer.module for layer in piece.layers] == list(net)
    assert [len(inputs) for inputs in piece.inputs] == [4]
    (line,) = watch.without_graph
    assert line.startswith("HetPipe: 'net' has no graph, so that stages begin between its children only, and run their")
    assert why in line


def test_layers_that_a_callback_changes_later() -> None:
    watch = watched(nn.Sequential(nn.Linear(4, 4), Block()), lambda layer: f"is a {type(layer).__name__}")
    assert watch.pieces[0].captured is None
    assert watch.without_graph[0].endswith("because layer 'net.0' is a Linear")


def test_a_sequential_inside_of_what_is_taken_apart() -> None:
    watch = watched(Decides(Leaf(), nn.Sequential(Block(), nn.Tanh()), nn.Sequential(Block(decides), nn.Linear(4, 2))))
    assert [piece.captured is not None for piece in watch.pieces] == [True, True, False]
    assert [names(piece) for piece in watch.pieces][1:] == [
        ["net.parts.1.0.one", "net.parts.1.0.two", "net.parts.1.1"],
        ["net.parts.2.0", "net.parts.2.1"],
    ]


def test_a_refused_kind_of_sequential_is_not_tried_again() -> None:
    class Item(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return through_numpy(self.linear(x))

    def step(module: Any, x: Tensor) -> Tensor:
        loss: Tensor = module.second(module.first(x)).sum()
        return loss

    module = Watched(step, first=nn.Sequential(Item(), nn.Tanh()), second=nn.Sequential(nn.Tanh(), Item(), Item()))
    watch = TrainingWatch(module, None, RandomGenerators(0), 1)
    with watch.watching():
        loss = module.training_step(X)
    watch.check(loss)
    first, second = watch.without_graph
    assert "'first' cannot be captured" in first
    assert "because another such Sequential could not be captured: 'first' cannot be captured" in second
