"""Descriptions of the values in a captured graph, as plain data, which outlives what the graph was traced with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.rules.channel_layouts import Size

KEYS = {"sizes", "dtype", "order", "several", "all_sizes", "number"}
"""Keys of descriptions."""


def described(value: Any) -> dict[str, Any]:
    """Describe a traced ``value``, for a node's ``meta``.

    Returns:
        For a tensor its ``sizes``, its ``dtype`` and the ``order`` of its dimensions in memory, the outermost first.
        For several tensors how many they are, ``several``, and ``all_sizes``. For a number that may vary ``number``.
    """
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        known = all(isinstance(stride, int) for stride in strides)
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim]) if known else _order(strides)
        return {"sizes": tuple(map(_size, value.shape)), "dtype": value.dtype, "order": tuple(order)}
    if isinstance(value, list | tuple) and all(isinstance(each, Tensor) for each in value):
        return {"several": len(value), "all_sizes": [tuple(map(_size, each.shape)) for each in value]}
    return {"number": _size(value)} if isinstance(value, torch.SymInt) else {}


def _size(size: Any) -> Size:
    if isinstance(size, int):
        return size
    expression = size.node.expr  # a guard may have left one number of it
    return int(expression) if expression.is_Integer else str(expression)


def _order(strides: tuple[Any, ...]) -> list[int]:
    """Order by strides of which some vary: by what they were when traced."""
    hints = [stride if isinstance(stride, int) else int(stride.node.hint) for stride in strides]
    return sorted(range(len(hints)), key=lambda dim: -hints[dim])
