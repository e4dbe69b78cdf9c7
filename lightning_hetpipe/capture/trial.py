"""Captures a piece, and tries its graph on the call that was watched: it must give the very same values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hetpipe.capture.captured import Captured, graph_layer
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.chance import Chance
from lightning_hetpipe.pipeline.graph_layer import GraphLayer
from lightning_hetpipe.pipeline.ring import copy_of
from lightning_hetpipe.pipeline.values import Value, equal


@dataclass(frozen=True)
class Call:
    """The watched call of a piece.

    Attributes:
        given: What it was given: (args, kwargs).
        buffers: Copies of its buffers from before.
        gave: What it gave.
    """

    given: Value
    buffers: dict[str, Tensor]
    gave: Value


def capture(piece: Piece, call: Call, chance: Chance, minibatch: int) -> None:
    """Gives ``piece`` its layers, and what each of them was given in the watched call.

    Raises:
        SettingError: if it cannot be captured, or if its graph gives other values than the module itself.
    """
    args, kwargs = call.given.tree(call.given.tensors)
    piece.captured = Captured(piece.name, piece.module, args, kwargs, piece.autocast)
    piece.layers = piece.captured.layers
    value = piece.value(args, kwargs)
    with chance.minibatch(minibatch), piece.autocast.opened():
        for layer in piece.layers:
            # With a graph, since some operators compute otherwise without; one layer at a time, to spare memory.
            with torch.enable_grad():
                own = graph_layer(layer)
                scratch = copy_of(own, None)
                _set_buffers(scratch, call.buffers)
                before = Value.of(value)
                piece.inputs.append(before)
                found = Value.of(scratch(before.tree(before.leaves(own.device))))
                del scratch
            value = found.tree(found.leaves(own.device))
    if len(found.tensors) != len(call.gave.tensors) or not all(map(_same, found.tensors, call.gave.tensors)):
        raise SettingError(
            f"the graph that torch.export makes of '{piece.name}' gives other values than the module itself, so that"
            " the module depends on something that the graph does not see, such as an attribute that forward reads and"
            " others set; make it a buffer or an argument, or call the module's parts from training_step"
        )


def _set_buffers(layer: GraphLayer, buffers: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for path, buffer in buffers.items():
            if (held := layer.held(path)) is not None:
                held.copy_(buffer)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and equal(one, other)
