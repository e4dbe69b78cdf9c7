"""Backward passes that users write themselves, which a captured graph does not keep: it derives its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction


def own_backward(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> str | None:
    """The name of a ``torch.autograd.Function`` between ``inputs`` and ``outputs``; None if there is none."""
    seen: set[Any] = {tensor.grad_fn for tensor in inputs}
    pending: list[Any] = [tensor.grad_fn for tensor in outputs]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, BackwardCFunction):
            return type(node).__name__.removesuffix("Backward")
        seen.add(node)
        pending.extend(following for following, _ in node.next_functions)
    return None
