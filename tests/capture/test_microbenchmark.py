"""Measuring layers runs each of them forward and backward, on scratch copies: nothing of the user's is disturbed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.capture import profiling
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.capture.profiling import ROUNDS, Microbenchmark, ProfilingInput
from lightning_hetpipe.pipeline.dtypes import Autocast
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.values import Value
from tests.support.traces import chance, shape_of

CPU = torch.device("cpu")
X = torch.arange(12.0).reshape(3, 4)


class Greedy(nn.Module):
    """Draws from every default generator, and changes the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        random.random()
        np.random.rand()
        torch.set_default_dtype(torch.float64)
        return x * self.weight + torch.rand_like(x)


class Counting(nn.Module):
    """Counts the calls of all of its copies."""

    forwards = 0
    backwards = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        Counting.forwards += 1
        y: Any = x * self.weight
        y.register_hook(self._backward)
        product: Tensor = y
        return product

    @staticmethod
    def _backward(_: Tensor) -> None:
        Counting.backwards += 1


def piece_of(*modules: nn.Module, inputs: list[Tensor] | None = None) -> Piece:
    """A piece whose layers were given ``inputs`` in its only call, or all of them ``X``."""
    given = inputs or [X.clone().requires_grad_(index > 0) for index in range(len(modules))]
    net = nn.Sequential(*modules)
    changes = [getattr(module, "inplace", False) for module in modules]
    layers = [Layer(f"net.{index}", *each) for index, each in enumerate(zip(modules, changes, strict=True))]
    return Piece("net", net, layers, [[Value.of(tensor) for tensor in given]])


def seconds(pieces: list[Piece], default_dtype: torch.dtype | None = None) -> list[float]:
    return ProfilingInput(pieces, RandomGenerators(0), default_dtype).seconds(CPU)


def test_one_time_for_each_layer_of_all_pieces() -> None:
    pieces = [piece_of(nn.Linear(4, 4), nn.ReLU(inplace=True)), piece_of(nn.Linear(4, 4))]
    times = seconds(pieces)
    assert len(times) == 3
    assert all(seconds > 0 for seconds in times)


def test_weights_buffers_and_gradients_are_not_touched() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(inplace=True), Greedy())
    net(X).sum().backward()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    before = shape_of(net)
    torch.set_default_dtype(torch.float32)
    seconds([piece_of(*net)])
    assert {name: torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items()} == dict.fromkeys(
        state, True
    )
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    assert shape_of(net) == before


def test_random_states_and_the_default_dtype_are_not_touched() -> None:
    piece = piece_of(nn.Dropout(0.5), Greedy(), nn.Linear(4, 4))
    before = chance()
    seconds([piece])
    assert chance() == before
    assert torch.get_default_dtype() is torch.float32


def test_random_states_are_not_touched_where_a_layer_fails() -> None:
    class Fails(Greedy):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise ArithmeticError("in a layer")

    before = chance()
    with pytest.raises(ArithmeticError, match="in a layer"):
        seconds([piece_of(Fails())])
    assert chance() == before
    assert torch.get_default_dtype() is torch.float32


def test_inputs_are_not_touched() -> None:
    inputs = [torch.full((3, 4), -1.0), torch.full((3, 4), -1.0, requires_grad=True)]
    seconds([piece_of(nn.ReLU(inplace=True), nn.ReLU(inplace=True), inputs=inputs)])
    assert all(torch.equal(tensor.detach(), torch.full((3, 4), -1.0)) for tensor in inputs)
    assert all(tensor.grad is None for tensor in inputs)


def test_inputs_are_copied_for_layers_that_change_them_only() -> None:
    """A copy would take as long as many a layer."""
    for inplace in (False, True):
        (piece,) = [piece_of(nn.ReLU(inplace=inplace))]
        benchmark = Microbenchmark(
            piece.layers[0], piece.inputs[0][0], piece, ProfilingInput([piece], RandomGenerators(0), None), CPU
        )
        leaves, own = benchmark.inputs()
        assert (leaves[0].data_ptr() != own[0].data_ptr()) is inplace


def test_each_layer_runs_forward_and_backward_once_a_round() -> None:
    Counting.forwards = Counting.backwards = 0
    seconds([piece_of(Counting())])
    assert (Counting.forwards, Counting.backwards) == (ROUNDS, ROUNDS)


def test_layers_that_nothing_can_be_differentiated_through() -> None:
    tokens = torch.tensor([[0, 1], [2, 3]])
    frozen = nn.Linear(4, 4).requires_grad_(False)
    pieces = [piece_of(nn.Embedding(5, 4), inputs=[tokens]), piece_of(frozen)]
    assert len(seconds(pieces)) == 2


def test_forwards_run_as_in_the_stages() -> None:
    """With what autocast did where the piece was called, and the default dtype of ``training_step``."""
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(((x @ x.T).dtype, torch.ones(1).dtype))
            return x

    piece = piece_of(Looks())
    with torch.autocast("cpu", torch.bfloat16):
        piece.autocast = Autocast.current()
    seconds([piece], torch.float64)
    assert seen == [(torch.bfloat16, torch.float64)] * ROUNDS


def test_times_come_from_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "layer_times", lambda layers, **_: [float(index) for index, _ in enumerate(layers)])
    assert seconds([piece_of(nn.Tanh(), nn.Tanh()), piece_of(nn.Tanh())]) == [0, 1, 2]


def test_a_piece_that_is_called_again_takes_its_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with inputs of the same sizes are measured once, and counted each."""
    monkeypatch.setattr(profiling, "layer_times", lambda layers, **_: [10.0**index for index, _ in enumerate(layers)])
    piece = piece_of(nn.Tanh(), nn.Sigmoid())
    wide = [Value.of(torch.ones(7, 4)) for _ in range(2)]
    piece.inputs = [*piece.inputs * 2, wide]
    assert seconds([piece]) == [2 + 10, 200 + 1000]
