"""Measures a model's layers on one device: how long each takes, and how many bytes it has."""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import median

import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.microbenchmark import Microbenchmark
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.pipeline.buffers import may_change, places
from lightning_hetpipe.pipeline.graph_layer import GraphLayer
from lightning_hetpipe.pipeline.memory import Counter
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.user.user_section import ProcessState, own_state
from lightning_hetpipe.pipeline.values import Value
from lightning_hetpipe.planning.model.profile import LayerBytes, Times, UserBytes

WARM_UP = 2
ROUNDS = 7
"""Rounds of each layer that count, after those that warm up; their median is taken."""

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
    optimizer: torch.optim.Optimizer | None
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
                    benchmark = Microbenchmark(
                        layer, value, piece, self.generators, self.default_dtype, device, self.finetuned
                    )
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
        kept.inputs,
        any(may_change(*place) for place in places([layer.module])),
        sum(parameter.nbytes for parameter in scratch.parameters() if not parameter.requires_grad),
    )


def _times(benchmark: Microbenchmark, update: Callable[[], object], now: Callable[[], float]) -> Times:
    rounds = []
    for _ in range(WARM_UP + ROUNDS):
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
