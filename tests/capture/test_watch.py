"""Watching one training_step: which modules are called, what their layers are, and no trace of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.grouping import is_plain_sequential
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.capture.watch import TrainingWatch
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from tests.support.traces import chance, shape_of

Step = Callable[[Any, Tensor], Tensor]


class Watched(L.LightningModule):
    """A module with named children, and a step that tests write themselves."""

    def __init__(self, step: Step, **children: nn.Module) -> None:
        super().__init__()
        self.step = step
        for name, child in children.items():
            setattr(self, name, child)

    def training_step(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def run_net(module: Any, x: Tensor) -> Tensor:
    loss: Tensor = module.net(x).sum()
    return loss


def watch(module: Watched, x: Tensor, names: list[str] | None = None) -> list[Piece]:
    seen = TrainingWatch(module, names, RandomGenerators(0), 1)
    with seen.watching():
        loss = module.training_step(x)
    seen.check(loss)
    return seen.pieces


def names(piece: Piece) -> list[str]:
    return [layer.name for layer in piece.layers]


def linear_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


X = torch.arange(12.0).reshape(3, 4)


def test_the_layers_are_the_children() -> None:
    module = Watched(run_net, net=linear_net())
    (piece,) = watch(module, X)
    assert (piece.name, piece.module) == ("net", module.net)
    assert names(piece) == ["net.0", "net.1", "net.2", "net.3", "net.4"]
    assert [layer.module for layer in piece.layers] == list(module.get_submodule("net").children())


def test_what_each_layer_was_given() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    (piece,) = watch(Watched(run_net, net=net), X)
    expected = X
    (inputs,) = piece.inputs
    for layer, value in zip(net, inputs, strict=True):
        assert torch.equal(value.tensors[0], expected)
        assert not value.tensors[0].requires_grad
        expected = layer(expected)
    # All but the first are on the way of a gradient.
    assert [value.requires_grad for value in inputs] == [(False,), (True,), (True,)]


def test_the_step_runs_as_it_would_without_us() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    module = Watched(run_net, net=net)
    plain = module.training_step(X)
    plain_gradients = torch.autograd.grad(plain, list(net.parameters()))
    seen = TrainingWatch(module, None, RandomGenerators(0), 1)
    with seen.watching():
        loss = module.training_step(X)
    assert torch.equal(loss, plain)
    for found, expected in zip(torch.autograd.grad(loss, list(net.parameters())), plain_gradients, strict=True):
        assert torch.equal(found, expected)


def test_nested_sequentials_are_taken_apart() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
    net = nn.Sequential(inner, nn.Tanh(), nn.Sequential(nn.Linear(4, 2)))
    (piece,) = watch(Watched(run_net, net=net), X)
    assert names(piece) == ["net.0.0", "net.0.1.0", "net.0.1.1", "net.1", "net.2.0"]


def test_a_sequential_that_does_more_than_call_its_children_stays_whole() -> None:
    class Skip(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            for child in self:
                input = input + child(input)
            return input

    skip = Skip(nn.Linear(4, 4), nn.ReLU())
    assert not is_plain_sequential(skip)
    (piece,) = watch(Watched(run_net, net=nn.Sequential(skip, nn.Linear(4, 2))), X)
    assert names(piece) == ["net.0", "net.1"]


def test_children_with_names_of_their_own() -> None:
    net = nn.Sequential()
    net.add_module("stem", nn.Linear(4, 4))
    net.add_module("head", nn.Linear(4, 2))
    assert names(watch(Watched(run_net, net=net), X)[0]) == ["net.stem", "net.head"]


def test_one_module_in_two_positions_is_two_layers() -> None:
    shared = nn.Linear(4, 4)
    (piece,) = watch(Watched(run_net, net=nn.Sequential(shared, nn.Tanh(), shared)), X)
    assert names(piece) == ["net.0", "net.1", "net.2"]
    assert piece.layers[0].module is piece.layers[2].module is shared
    assert torch.equal(piece.inputs[0][2].tensors[0], torch.tanh(shared(X)))


def test_layers_that_change_their_input_in_place() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.5, inplace=True))
    net.append(nn.ReLU())
    (piece,) = watch(Watched(run_net, net=net), X)
    assert [layer.mutates_input for layer in piece.layers] == [False, True, False, True, False]


def test_values_that_are_not_tensors_pass_through_layers() -> None:
    class Both(nn.Module):
        def forward(self, value: dict[str, Any]) -> dict[str, Any]:
            if value["x"].isnan().any():  # else a graph would stand for the layers
                raise ArithmeticError
            return {"x": value["x"] * 2, "note": value["note"]}

    class Pick(nn.Module):
        def forward(self, value: dict[str, Any]) -> Tensor:
            x: Tensor = value["x"]
            return x

    def step(module: Any, x: Tensor) -> Tensor:
        loss: Tensor = module.net({"x": x, "note": "same"}).sum()
        return loss

    (piece,) = watch(Watched(step, net=nn.Sequential(Both(), Pick(), nn.Linear(4, 1))), X)
    (inputs,) = piece.inputs
    assert inputs[1].tree(inputs[1].tensors)["note"] == "same"
    assert torch.equal(inputs[2].tensors[0], X * 2)


def test_pieces_are_in_the_order_of_their_calls() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        loss: Tensor = module.first(torch.tanh(module.second(x))).sum()
        return loss

    module = Watched(step, first=nn.Sequential(nn.Linear(4, 2)), second=nn.Sequential(nn.Linear(4, 4)))
    assert [piece.name for piece in watch(module, X)] == ["second", "first"]


def test_sequentials_without_trainable_parameters_are_no_pieces() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        loss: Tensor = module.net(module.frozen(module.scale(x))).sum()
        return loss

    frozen = nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
    scale = nn.Sequential(nn.Tanh())
    module = Watched(step, net=nn.Sequential(nn.Linear(4, 4)), frozen=frozen, scale=scale)
    assert [piece.name for piece in watch(module, X)] == ["net"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


def test_sequentials_inside_a_piece_are_no_pieces() -> None:
    (piece,) = watch(Watched(run_net, net=nn.Sequential(Block(), nn.Linear(4, 4))), X)
    assert piece.name == "net"


def test_a_module_around_a_sequential_is_the_piece() -> None:
    (piece,) = watch(Watched(run_net, net=Block()), X)
    assert piece.name == "net"
    assert piece.captured is not None
    assert names(piece) == ["net.body.0"]


def test_only_the_named_pieces() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        loss: Tensor = module.net(module.other(x)).sum()
        return loss

    other = nn.Sequential(nn.Linear(4, 4))
    module = Watched(step, net=nn.Sequential(nn.Linear(4, 4)), other=other)
    seen = TrainingWatch(module, ["net"], RandomGenerators(0), 1)
    with seen.watching():
        loss = module.training_step(X)
    seen.check(loss)
    assert [piece.name for piece in seen.pieces] == ["net"]


@pytest.mark.parametrize("fails", [False, True])
def test_no_trace_remains_in_the_modules(fails: bool) -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        loss: Tensor = module.net(x).sum()
        if fails:
            raise ArithmeticError("in training_step")
        return loss

    module = Watched(step, net=nn.Sequential(linear_net(), nn.RReLU(), nn.Linear(2, 2)))
    before = shape_of(module)
    seen = TrainingWatch(module, None, RandomGenerators(0), 1)
    try:
        with seen.watching():
            loss = module.training_step(X)
        seen.check(loss)
    except ArithmeticError:
        assert fails
    assert len(seen.pieces) == (not fails)
    assert shape_of(module) == before


def test_no_trace_remains_where_a_layer_fails() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError("in a layer")

    module = Watched(run_net, net=nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Fails()))
    before = shape_of(module)
    with pytest.raises(ArithmeticError, match="in a layer"):
        watch(module, X)
    assert shape_of(module) == before


def test_the_watched_step_draws_as_the_minibatch_would() -> None:
    """From generators of its own: default ones are left alone, and it repeats."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Flatten())
    module = Watched(run_net, net=net)
    before = chance()
    (first,), (second,) = watch(module, X), watch(module, X)
    assert chance() == before
    assert torch.equal(first.inputs[0][2].tensors[0], second.inputs[0][2].tensors[0])
    assert (first.inputs[0][2].tensors[0] == 0).any()


def test_a_single_layer_of_torchs_own_is_told_by_its_class() -> None:
    (piece,) = watch(Watched(run_net, net=nn.Linear(4, 2)), X)
    assert [(layer.name, layer.kind) for layer in piece.layers] == [("net", "Linear")]
