"""Measures a model's layers on one device: how long each takes, and how many bytes it has.

A microbenchmark runs a layer's forward and backward on a scratch copy: no weight, buffer or random state is touched.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.pipeline.buffers import may_change, places
from lightning_hetpipe.pipeline.creation import creating
from lightning_hetpipe.pipeline.graph_layer import GraphLayer
from lightning_hetpipe.pipeline.memory import Counter
from lightning_hetpipe.pipeline.random.generators import RandomGenerators, attach
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.streams import move
from lightning_hetpipe.pipeline.user.user_section import ProcessState, own_state
from lightning_hetpipe.pipeline.values import Value, gradients, tensors_of
from lightning_hetpipe.pipeline.weight_stash import copy_of
from lightning_hetpipe.planning.model.profile import LayerBytes, Times, UserBytes

ROUNDS = 5
"""Rounds for each layer. The watched step, and the comparison of its graph, have warmed up.

*Measured* beside other programs, on a model with two partitions of which one is 2% better: of three rounds' medians
3 in 10 choose the other one, of five rounds' least times 1 in 14.
"""


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

    Attributes:
        device: Where it runs; by default where the layer lies.
        lasts: Whether it may be run again: its copy takes no memory for weights, and a graph sets no attributes.
    """

    def __init__(
        self, layer: Layer, value: Value, piece: Piece, profiling: ProfilingInput, device: torch.device | None
    ) -> None:
        own = [*layer.module.parameters(), *layer.module.buffers(), *value.tensors]
        device = device or (own[0].device if own else torch.device("cpu"))
        there = all(tensor.device == device for tensor in [*layer.module.parameters(), *layer.module.buffers()])
        self.scratch = copy_of(layer.module, None if there else device)
        self.device = device
        self.lasts = there and isinstance(layer.module, GraphLayer)
        if profiling.finetuned:
            for parameter in self.scratch.parameters():
                parameter.requires_grad_(_has_gradient(parameter))
            value = replace(value, requires_grad=tuple(map(_has_gradient, value.tensors)))
        self._call = attach(self.scratch, layer.name)
        self._mutates_input = layer.mutates_input
        self._parameters = list(self.scratch.parameters())
        self._value, self._piece, self._profiling = value, piece, profiling

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
        of = self._profiling
        with of.generators.minibatch(0), self._piece.autocast.opened(), creating(of.default_dtype):
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


WARM_UP = 2
TIMED = 7
"""Rounds of each layer that a profile counts, after those that warm up; their median is taken."""

METHOD = 4
"""Counts the ways in which layers, and parts of them, were measured: what another one has found is measured anew."""


@dataclass(frozen=True)
class ProfilingInput:
    """Layers of a model with their inputs in the watched step, from which it can be profiled.

    Attributes:
        pieces: With what each of their layers was given.
        generators: Of random operations.
        default_dtype: In the watched step; None for torch's own.
        optimizer: The Trainer's.
        samples: In its minibatch.
        called: Which of the pieces the step calls, in order.
        user: What user code takes beside the layers.
        finetuned: Whether weights that are frozen in the watched step are trained later: layers are then measured as
            they are with all weights trained.
        why_apart: Why a module was taken apart, so that parts of it have no layers; empty if none was.
    """

    pieces: Sequence[Piece]
    generators: RandomGenerators
    default_dtype: torch.dtype | None
    optimizer: torch.optim.Optimizer | None = None
    samples: int = 1
    called: Sequence[int] = ()
    user: UserBytes = field(default_factory=UserBytes)
    finetuned: bool = False
    why_apart: str = ""

    @property
    def calls(self) -> list[tuple[int, int]]:
        """The calls of the step, as a profile has them: none where each piece is called once."""
        if len(self.called) <= len(self.pieces):
            return []
        ends = [*accumulate(len(piece.layers) for piece in self.pieces)]
        return [(ends[place] - len(self.pieces[place].layers), ends[place]) for place in self.called]

    @property
    def layers(self) -> list[tuple[Layer, list[tuple[Value, int]], Piece]]:
        """Each layer with what it was given, and in how many calls."""
        return [
            (layer, values, piece)
            for piece in self.pieces
            for layer, values in zip(piece.layers, piece.measured_inputs(), strict=True)
        ]

    def on(
        self, device: torch.device, now: Callable[[], float] = time.perf_counter
    ) -> Iterator[tuple[LayerBytes, Times]]:
        """Measures each layer on ``device``, one after another: what all of its calls in a minibatch take together.

        Weights, buffers and random states stay as they are. Layers are copied and measured one after another, so that a
        device needs no more memory than the largest takes.

        Args:
            device: A CPU, or a GPU.
            now: The clock, in seconds.
        """
        return self._measured(device, lambda each: _times(each, _update(self.optimizer, each), now))

    def seconds(
        self,
        device: torch.device | None = None,
        *,
        backward: bool = True,
        tick: Callable[[], object] = lambda: None,
    ) -> list[float]:
        """Seconds that each layer takes in a minibatch: forward and backward of each call.

        One copy of a layer is there at a time, but for graphs whose copies share the live weights.

        Args:
            device: Where layers are measured; None for where each of them lies.
            backward: Whether backwards count; without them, forwards run in the mode of gradients that holds here.
            tick: Called after each layer in each round.
        """
        layers = self.layers
        with own_state(ProcessState.seeded(0, 0, "microbenchmark")):
            measured = [
                (index, times, partial(Microbenchmark, layer, value, piece, self, device))
                for index, (layer, values, piece) in enumerate(layers)
                for value, times in values
            ]
            seconds = layer_times([_brought(make, backward) for *_, make in measured], tick=tick)
        found = [0.0] * len(layers)
        for (index, times, _), one in zip(measured, seconds, strict=True):
            found[index] += times * one
        return found

    def sizes(self) -> list[LayerBytes]:
        """Bytes of each layer, where it lies."""
        return [size for size, _ in self._measured(None, lambda benchmark: Times(0.0, 0.0))]

    def _measured(
        self, device: torch.device | None, timed: Callable[[Microbenchmark], Times]
    ) -> Iterator[tuple[LayerBytes, Times]]:
        for layer, values, piece in self.layers:
            found = []
            with own_state(ProcessState.seeded(0, 0, "profiling")):
                for value, times in values:
                    benchmark = Microbenchmark(layer, value, piece, self, device)
                    found += [(_bytes(layer, benchmark), timed(benchmark))] * times
            yield _together(found)


def _together(calls: Sequence[tuple[LayerBytes, Times]]) -> tuple[LayerBytes, Times]:
    """Bytes and seconds of one layer's ``calls`` in a minibatch; its weights are there, and updated, once."""
    first, times = calls[0]
    if len(calls) == 1:
        return first, times
    kept, output, given = (sum(getattr(each, part) for each, _ in calls) for part in ("kept", "output", "given"))
    forward, backward = (sum(getattr(each, part) for _, each in calls) for part in ("forward", "backward"))
    return replace(first, kept=kept, output=output, given=given), Times(forward, backward, times.update)


def _bytes(layer: Layer, benchmark: Microbenchmark) -> LayerBytes:
    scratch, (_, own) = benchmark.scratch, benchmark.inputs()
    outputs, kept = Counter().kept(
        own, lambda: benchmark.forward(own), lambda: [*scratch.parameters(), *scratch.buffers()]
    )
    return LayerBytes(
        layer.name,
        sum(parameter.nbytes for parameter in scratch.parameters()),
        kept.all,
        sum(output.nbytes for output in outputs),
        given=kept.inputs,
        changes_buffers=any(may_change(*place) for place in places([layer.module])),
        frozen=sum(parameter.nbytes for parameter in scratch.parameters() if not parameter.requires_grad),
    )


def _times(benchmark: Microbenchmark, update: Callable[[], object], now: Callable[[], float]) -> Times:
    rounds = []
    for _ in range(WARM_UP + TIMED):
        inputs, own = benchmark.inputs()
        began = now()
        outputs = benchmark.forward(own)
        turned = now()
        benchmark.backward(inputs, outputs)
        ended = now()
        update()
        rounds.append((turned - began, ended - turned, now() - ended))
    return Times(*map(median, zip(*rounds[WARM_UP:], strict=True)))


def _update(optimizer: torch.optim.Optimizer | None, benchmark: Microbenchmark) -> Callable[[], object]:
    """A step of an optimizer like ``optimizer`` on such weights; nothing where it is none of torch's own."""
    parameters = [nn.Parameter(each.detach().clone()) for each in benchmark.scratch.parameters() if each.requires_grad]
    if optimizer is None or not parameters or not type(optimizer).__module__.startswith("torch.optim."):
        return lambda: None
    known = inspect.signature(type(optimizer)).parameters
    like = type(optimizer)(parameters, **{key: value for key, value in optimizer.defaults.items() if key in known})
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        like.step()
        benchmark.wait()

    return step


def code_of(module: nn.Module) -> str:
    """A hash that changes with what ``module`` computes, as far as its code, its graph and its ``repr`` say."""
    parts = [repr(module)]
    for each in module.modules():
        if isinstance(each, GraphLayer):
            parts += [graph.text for graph in each.code.graphs]
        else:
            parts.append(_attributes(each))
            try:
                parts.append(inspect.getsource(type(each)))
            except (OSError, TypeError):  # typed at a prompt, say
                parts.append(f"{type(each).__module__}.{type(each).__qualname__}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _attributes(module: nn.Module) -> str:
    """Its mode, and what it was told and its ``repr`` may leave out, such as an attention's number of heads."""
    found = {name: value for name, value in sorted(vars(module).items()) if not name.startswith("_")}
    return "; ".join(f"{name}={_plain(value)}" for name, value in found.items() if not isinstance(value, Tensor))


def _plain(value: object) -> str:
    """Without addresses, which differ from run to run."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_plain, value))}]"
    return str(getattr(value, "__qualname__", type(value).__qualname__))
