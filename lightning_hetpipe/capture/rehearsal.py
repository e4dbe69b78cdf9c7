"""Runs a layer's forward and backward on a scratch copy, to be timed: no weight, buffer or random state is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.pipeline.chance import Chance, attach
from lightning_hetpipe.pipeline.creation import creating
from lightning_hetpipe.pipeline.lanes import move
from lightning_hetpipe.pipeline.ring import copy_of
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.pipeline.stretch import ProcessState
from lightning_hetpipe.pipeline.values import Value, gradients, tensors_of
from lightning_hetpipe.planning.timing import layer_times


def measure(
    pieces: Sequence[Piece],
    chance: Chance,
    default_dtype: torch.dtype | None,
    device: torch.device,
    backward: bool = True,
) -> list[float]:
    """Seconds that each layer of ``pieces`` takes on ``device``, forward and backward, on the watched step's inputs.

    Without ``backward``, forward only, in the mode of gradients that holds here.
    """
    state = ProcessState.current()
    try:
        return layer_times(
            [
                _rehearsal(layer, value, piece, chance, default_dtype, device, backward)
                for piece in pieces
                for layer, value in zip(piece.layers, piece.inputs, strict=True)
            ]
        )
    finally:
        state.restore()


def _rehearsal(
    layer: Layer,
    value: Value,
    piece: Piece,
    chance: Chance,
    default_dtype: torch.dtype | None,
    device: torch.device,
    backward: bool,
) -> Callable[[], None]:
    scratch = copy_of(layer.module, None)
    call = attach(scratch, layer.name)
    parameters = list(scratch.parameters())

    def run_forward() -> None:
        with chance.minibatch(0), piece.autocast.opened(), creating(default_dtype):
            call(value.tree([move(tensor, device).clone() for tensor in value.tensors]))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def run() -> None:
        inputs = value.leaves(device)
        own = [tensor.clone() for tensor in inputs]
        with torch.enable_grad():
            with chance.minibatch(0), piece.autocast.opened(), creating(default_dtype):
                outputs = tensors_of(call(value.tree(own)))
            ones = [torch.ones_like(o) if o.is_floating_point() else None for o in outputs]
            gradients(outputs, ones, [*inputs, *parameters])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run if backward else run_forward
