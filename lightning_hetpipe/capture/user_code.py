"""Bytes that the user's ``training_step`` takes beside the modules that it calls, as the watched step shows them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.call_tree import CallNode
from lightning_hetpipe.pipeline.values import blocks, tensors_of
from lightning_hetpipe.planning.model.profile import UserBytes


def user_bytes(
    root: nn.Module, loss: Tensor, batch: Any, calls: Sequence[CallNode], pieces: Collection[nn.Module]
) -> UserBytes:
    """Count what lies on the last stage's device besides layers.

    Args:
        root: The LightningModule.
        loss: Of the watched step, before its backward.
        batch: Arguments of the step.
        calls: Calls of ``pieces`` in it.
        pieces: The modules that are pipelined.
    """
    inside = {id(tensor) for piece in pieces for tensor in (*piece.parameters(), *piece.buffers())}
    outside = [each for each in (*root.parameters(), *root.buffers()) if id(each) not in inside]
    trained = sum(each.nbytes for each in outside if each.requires_grad)
    ends = {node for call in calls for node in call.outputs}
    behind = _nodes([loss.grad_fn], ends)
    before = _nodes([node for call in calls for node in call.inputs], ends)
    own = blocks(tensors_of(batch))
    counted = {*own, *blocks((*root.parameters(), *root.buffers())), *(each for call in calls for each in call.blocks)}
    kept, saved = _saved(before), _saved(behind - before)
    return UserBytes(
        trained,
        sum(each.nbytes for each in outside) - trained,
        sum(own.values()),
        sum(size for block, size in kept.items() if block not in counted),
        sum(size for block, size in saved.items() if block not in counted and block not in kept),
    )


def _nodes(starts: Iterable[Any], ends: Collection[Any]) -> set[Any]:
    """The nodes of autograd's graph that are reached from ``starts``, as far as ``ends``."""
    found, left = set[Any](), [node for node in starts if node is not None and node not in ends]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += [other for other, _ in node.next_functions if other is not None and other not in ends]
    return found


def _saved(nodes: Iterable[Any]) -> dict[tuple[torch.device, int], int]:
    """The blocks of memory that ``nodes`` keep for their backward."""
    return blocks([tensor for node in nodes for tensor in _saved_by(node)])


def _saved_by(node: Any) -> Iterator[Tensor]:
    """Yield what ``node`` keeps; where hooks have packed it, the packed tensor, since to unpack would run user code."""
    for name in _names(node.__class__):
        value = getattr(node, name)
        packed = (each.data for each in (value if isinstance(value, tuple) else [value]) if hasattr(each, "data"))
        yield from (each for each in packed if isinstance(each, Tensor))


@cache
def _names(kind: Any) -> list[str]:
    """The attributes of nodes of that ``kind`` that hold saved tensors, as torch documents them."""
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]
