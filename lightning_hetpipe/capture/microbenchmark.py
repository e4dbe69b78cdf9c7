"""Runs a layer's forward and backward on a scratch copy, to be timed: no weight, buffer or random state is touched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.pipeline.creation import creating
from lightning_hetpipe.pipeline.graph_layer import GraphLayer
from lightning_hetpipe.pipeline.random.generators import RandomGenerators, attach
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.streams import move
from lightning_hetpipe.pipeline.user.user_section import ProcessState, own_state
from lightning_hetpipe.pipeline.values import Value, gradients, tensors_of
from lightning_hetpipe.pipeline.weight_stash import copy_of

ROUNDS = 5
"""Rounds for each layer. The watched step, and the comparison of its graph, have warmed up.

*Measured* beside other programs, on a model with two partitions of which one is 2% better: of three rounds' medians
3 in 10 choose the other one, of five rounds' least times 1 in 14.
"""


def measure(
    pieces: Sequence[Piece],
    generators: RandomGenerators,
    default_dtype: torch.dtype | None,
    device: torch.device | None = None,
    backward: bool = True,
    tick: Callable[[], object] = lambda: None,
    trained: bool = False,
) -> list[float]:
    """Seconds that each layer of ``pieces`` takes in a minibatch: forward and backward of each call, on the inputs of
    the watched step.

    One copy of a layer is there at a time, but for graphs whose copies share the live weights.

    Args:
        pieces: As a watched step has shown them.
        generators: Of random operations.
        default_dtype: In the watched step; None for torch's own.
        device: Where layers are measured; None for where each of them lies.
        backward: Whether backwards count; without them, forwards run in the mode of gradients that holds here.
        tick: Called after each layer in each round.
        trained: Whether frozen weights are measured as trained ones.
    """
    layers = [(*pair, piece) for piece in pieces for pair in zip(piece.layers, piece.measured_inputs(), strict=True)]
    with own_state(ProcessState.seeded(0, 0, "microbenchmark")):
        measured = [
            (index, times, partial(Microbenchmark, layer, value, piece, generators, default_dtype, device, trained))
            for index, (layer, values, piece) in enumerate(layers)
            for value, times in values
        ]
        seconds = layer_times([_brought(make, backward) for *_, make in measured], tick=tick)
    found = [0.0] * len(layers)
    for (index, times, _), one in zip(measured, seconds, strict=True):
        found[index] += times * one
    return found


def _brought(make: Callable[[], Microbenchmark], backward: bool) -> Callable[[], Callable[[], None]]:
    kept: Microbenchmark | None = None

    def bring() -> Callable[[], None]:
        nonlocal kept
        benchmark = kept or make()
        kept = benchmark if benchmark.lasts else None
        return benchmark.run if backward else benchmark.infer

    return bring


def layer_times(
    layers: Sequence[Callable[[], Callable[[], None]]], rounds: int = ROUNDS, tick: Callable[[], object] = lambda: None
) -> list[float]:
    """The least seconds of each of ``layers`` in ``rounds`` rounds through all of them: whatever disturbs adds to them.

    Args:
        layers: For each layer a call that brings it to the device, untimed, and gives one that runs its forward and
            backward once, to completion. Layers take turns, so that a disturbance of the machine hits neighbours alike.
        rounds: How often each is timed.
        tick: Is called after each of these.
    """
    times: list[list[float]] = [[] for _ in layers]
    for _ in range(rounds):
        for layer, seconds in zip(layers, times, strict=True):
            run = layer()
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
            del run  # before the next layer is there
            tick()
    return [min(seconds) for seconds in times]


class Microbenchmark:
    """One layer of ``piece``, on scratch weights and on copies of its inputs ``value``; calls last until it is done.

    With ``trained``, frozen weights are trained ones, and inputs require the gradients that come with that.

    Attributes:
        device: Where it runs.
        lasts: Whether it may be run again: its copy takes no memory for weights, and a graph sets no attributes.
    """

    def __init__(
        self,
        layer: Layer,
        value: Value,
        piece: Piece,
        generators: RandomGenerators,
        default_dtype: torch.dtype | None,
        device: torch.device | None,
        trained: bool = False,
    ) -> None:
        own = [*layer.module.parameters(), *layer.module.buffers(), *value.tensors]
        device = device or (own[0].device if own else torch.device("cpu"))
        there = all(tensor.device == device for tensor in [*layer.module.parameters(), *layer.module.buffers()])
        self.scratch = copy_of(layer.module, None if there else device)
        self.device = device
        self.lasts = there and isinstance(layer.module, GraphLayer)
        if trained:
            for parameter in self.scratch.parameters():
                parameter.requires_grad_(_has_gradient(parameter))
            value = replace(value, requires_grad=tuple(map(_has_gradient, value.tensors)))
        self._call = attach(self.scratch, layer.name)
        self._mutates_input = layer.mutates_input
        self._parameters = list(self.scratch.parameters())
        self._value, self._piece, self._generators, self._default_dtype = value, piece, generators, default_dtype

    def infer(self) -> None:
        """A forward, in the mode of gradients that holds here."""
        self._forward([move(tensor, self.device).clone() for tensor in self._value.tensors])
        self.wait()

    def run(self) -> None:
        """Forward and backward."""
        inputs, own = self.inputs()
        self.backward(inputs, self.forward(own))

    def inputs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Fresh leaves, and tensors for :meth:`forward`: the leaves, or copies where the layer changes its input.

        A copy takes as long as many a layer, so that none is made for the others.
        """
        leaves = self._value.leaves(self.device)
        with torch.enable_grad():
            return leaves, [tensor.clone() for tensor in leaves] if self._mutates_input else [*leaves]

    def forward(self, own: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of a forward in training."""
        with torch.enable_grad():
            outputs = tensors_of(self._forward(own))
        self.wait()
        return outputs

    def backward(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the leaves ``inputs``, and then of the weights."""
        with torch.enable_grad():
            ones = [torch.ones_like(o) if o.is_floating_point() else None for o in outputs]
            found = gradients(outputs, ones, [*inputs, *self._parameters])
        self.wait()
        return found

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Within it, what the layer computes is computed as in a run."""
        with self._generators.minibatch(0), self._piece.autocast.opened(), creating(self._default_dtype):
            yield

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """The layer's input, made of ``tensors``."""
        return self._value.tree(tensors)

    def _forward(self, tensors: Sequence[Tensor]) -> Any:
        with self.opened():
            return self._call(self.value(tensors))

    def wait(self) -> None:
        """Wait until the device is done."""
        if accelerates(self.device):
            torch.accelerator.synchronize(self.device)


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
