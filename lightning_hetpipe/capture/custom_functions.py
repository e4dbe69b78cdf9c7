"""Backward passes that users write themselves, which a captured graph does not keep: it derives its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lightning_hetpipe.torch_private import graph_nodes


def own_backward(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> str | None:
    """The name of a ``torch.autograd.Function`` between ``inputs`` and ``outputs``; None if there is none."""
    nodes: Iterator[Any] = graph_nodes([tensor.grad_fn for tensor in outputs], [tensor.grad_fn for tensor in inputs])
    found = next((node for node in nodes if isinstance(node, BackwardCFunction)), None)
    return None if found is None else type(found).__name__.removesuffix("Backward")
