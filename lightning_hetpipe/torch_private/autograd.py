"""Private names of torch for backward passes, and the graphs that they follow.

If torch does not have a name:

- ``_execution_engine``: this module cannot be imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

_engine: Any = torch.autograd.Variable._execution_engine


def run_backward(
    outputs: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor | GradientEdge],
    keep_graph: bool = False,
) -> Sequence[Tensor | None]:
    """Compute gradients as ``torch.autograd.grad`` does, without its slow checks. Unreached inputs get None."""
    found: Sequence[Tensor | None] = _engine.run_backward(
        tuple(outputs),
        tuple(gradients),
        keep_graph,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def graph_nodes(starts: Iterable[Node | None], barred: Iterable[Node | None]) -> Iterator[Node]:
    """Yield the nodes of autograd's graph from ``starts`` (included) on, on ways that pass no ``barred`` node."""
    seen: set[Node | None] = {None, *barred}
    pending = list(starts)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        yield node
        seen.add(node)
        pending.extend(following for following, _ in node.next_functions)


def following_nodes(tensors: Iterable[Tensor]) -> list[Node | None]:
    """Return the nodes next to the nodes of ``tensors``, on the way to leaves."""
    return [following for tensor in tensors if tensor.grad_fn for following, _ in tensor.grad_fn.next_functions]


def graph_start(tensor: Tensor) -> Node | Tensor | None:
    """Return the start of autograd's graph of ``tensor``: its node, the tensor itself if it is a leaf, or None."""
    return tensor.grad_fn if tensor.grad_fn is not None else tensor if tensor.requires_grad else None


def graph_leaves(starts: Iterable[Node | Tensor | None], barred: Iterable[Node | None] = ()) -> Iterator[Tensor]:
    """Yield the leaves to which ``starts`` lead on ways that pass no ``barred`` node (``AccumulateGrad.variable``)."""
    starts = [*starts]
    yield from (start for start in starts if isinstance(start, Tensor))
    for node in graph_nodes((start for start in starts if not isinstance(start, Tensor)), barred):
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
