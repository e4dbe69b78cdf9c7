"""Measurement of a model's layers on one device: time and bytes of each layer.

A microbenchmark runs a layer's forward and backward on a scratch copy, so no weight, buffer or random state changes.
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
from lightning_hetpipe.pipeline.dtypes import creating
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

*Measured* beside other programs, on a model with two partitions of which one is 2% better. The medians of three rounds
choose the worse one 3 times in 10, the smallest times of five rounds 1 time in 14.
"""


def layer_times(
    layers: Sequence[Callable[[], Microbenchmark]],
    rounds: int = ROUNDS,
    tick: Callable[[], object] = lambda: None,
    *,
    backward: bool = True,
) -> list[float]:
    """Return the smallest seconds of each of ``layers`` in ``rounds`` rounds, because disturbances only add.

    Args:
        layers: For each layer, a function that brings the layer to the device, untimed. They take turns, so a
            disturbance hits neighbours alike.
        tick: Called after each run.
        backward: Whether a run includes the backward.
    """
    times: list[list[float]] = [[] for _ in layers]
    kept: dict[int, Microbenchmark] = {}
    for _ in range(rounds):
        for place, bring in enumerate(layers):
            benchmark = kept.get(place) or bring()
            if benchmark.lasts:
                kept[place] = benchmark
            run = benchmark.run if backward else benchmark.infer
            started = time.perf_counter()
            run()
            times[place].append(time.perf_counter() - started)
            del run, benchmark  # before the next layer is there
            tick()
    return [min(seconds) for seconds in times]


class Microbenchmark:
    """One layer of ``piece`` on scratch weights and on copies of its inputs ``value``. Calls wait for the device.

    It runs on ``device``, by default the layer's own. ``lasts`` is True if it may run again: its copy takes no memory
    for weights, and a graph sets no attributes.
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
        """Run a forward in the present mode of gradients."""
        self._forward([move(tensor, self.device).clone() for tensor in self._value.tensors])
        self.wait()

    def run(self) -> None:
        """Run forward and backward."""
        inputs, own = self.inputs()
        self.backward(inputs, self.forward(own))

    def inputs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return fresh leaves, and tensors for :meth:`forward`: the leaves, or copies if the layer changes its input.

        A copy takes as long as many layers, so other layers get none.
        """
        leaves = self._value.leaves(self.device)
        with torch.enable_grad():
            return leaves, [tensor.clone() for tensor in leaves] if self._mutates_input else [*leaves]

    def forward(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of a forward in training."""
        with torch.enable_grad():
            outputs = tensors_of(self._forward(own))
        self.wait()
        return outputs

    def backward(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of the leaves ``inputs``, followed by the gradients of the weights."""
        with torch.enable_grad():
            ones = [torch.ones_like(o) if o.is_floating_point() else None for o in outputs]
            found = gradients(outputs, ones, [*inputs, *self._parameters])
        self.wait()
        return found

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Context manager in which the layer computes as in a run."""
        of = self._profiling
        with of.generators.minibatch(0), self._piece.autocast.opened(), creating(of.default_dtype):
            yield

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """Make the layer's input from ``tensors``."""
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
"""Rounds of each layer that a profile counts, after the rounds that warm up. It takes their median."""

METHOD = 4
"""Version of the way in which layers and their parts are measured. Results of another version are measured anew."""


@dataclass(frozen=True)
class ProfilingInput:
    """Layers of a model with their inputs in the watched step, from which a profile can be made.

    Attributes:
        pieces: Pieces with the inputs of their layers.
        default_dtype: Default dtype in the watched step, or None for torch's own.
        samples: Samples of the minibatch.
        called: Which of the pieces the step calls, in order.
        user: What user code takes beside the layers.
        finetuned: Whether weights frozen in the watched step are trained later. Layers are then measured with all
            weights trained.
        why_apart: Why a module was taken apart, so that parts of it have no layers, or an empty text.
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
        """Calls of the step in a profile's form, empty if each piece is called once."""
        if len(self.called) <= len(self.pieces):
            return []
        ends = [*accumulate(len(piece.layers) for piece in self.pieces)]
        return [(ends[place] - len(self.pieces[place].layers), ends[place]) for place in self.called]

    @property
    def layers(self) -> list[tuple[Layer, list[tuple[Value, int]], Piece]]:
        """Each layer with its inputs and the number of calls for each input."""
        return [
            (layer, values, piece)
            for piece in self.pieces
            for layer, values in zip(piece.layers, piece.measured_inputs(), strict=True)
        ]

    def on(
        self, device: torch.device, now: Callable[[], float] = time.perf_counter
    ) -> Iterator[tuple[LayerBytes, Times]]:
        """Measure each layer on ``device``, one after another, for all its calls in a minibatch together.

        Weights, buffers and random states stay unchanged. Layers are copied one at a time, so the device needs memory
        for the largest only. ``now`` is a clock in seconds.
        """
        return self._measured(device, lambda each: _times(each, _update(self.optimizer, each), now))

    def seconds(
        self, device: torch.device | None = None, *, backward: bool = True, tick: Callable[[], object] = lambda: None
    ) -> list[float]:
        """Return the seconds of each layer in a minibatch: forward and backward of each call.

        One copy of a layer exists at a time, except for graphs, whose copies share the live weights.

        Args:
            device: Device to measure on, or None for each layer's own device.
            backward: Whether backwards count. Without them, forwards run in the present mode of gradients.
            tick: Called after each layer in each round.
        """
        layers = self.layers
        with own_state(ProcessState.seeded(0, 0, "microbenchmark")):
            measured = [
                (index, times, partial(Microbenchmark, layer, value, piece, self, device))
                for index, (layer, values, piece) in enumerate(layers)
                for value, times in values
            ]
            seconds = layer_times([make for *_, make in measured], tick=tick, backward=backward)
        found = [0.0] * len(layers)
        for (index, times, _), one in zip(measured, seconds, strict=True):
            found[index] += times * one
        return found

    def sizes(self) -> list[LayerBytes]:
        """Return the bytes of each layer, measured on its own device."""
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
    """Add bytes and seconds of one layer's ``calls`` in a minibatch. Its weights exist, and are updated, once."""
    first, times = calls[0]
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
    """Return a step of an optimizer like ``optimizer`` on such weights. Optimizers outside torch do nothing."""
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
    """Return a hash of what ``module`` computes, by its code, its graph and its ``repr``."""
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
    """Describe its mode, and settings that its ``repr`` may leave out, such as an attention's number of heads."""
    found = {name: value for name, value in sorted(vars(module).items()) if not name.startswith("_")}
    return "; ".join(f"{name}={_plain(value)}" for name, value in found.items() if not isinstance(value, Tensor))


def _plain(value: object) -> str:
    """Describe ``value`` without addresses, which differ between runs."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_plain, value))}]"
    return str(getattr(value, "__qualname__", type(value).__qualname__))
