"""Call of an operator in a graph, and the way in which members of a group compute it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lightning_hetpipe.rules.channel_layouts import ChannelLayout, Size, Sizes

Layouts = ChannelLayout | tuple[ChannelLayout | None, ...]
"""Layout of an operator's output, or of each of several outputs."""


@dataclass(frozen=True)
class Divided:
    """Way in which members compute an operator.

    Attributes:
        layout: Layout of their results. If the results are added, layout of the divided operand.
        operands: Layouts in which members hold operands, by node. Other operands are whole.
        arguments: Replacement of the argument at a position, for each member.
        target: The operator, if it is another one.
        adds: Whether members' results are added.
    """

    layout: Layouts
    operands: Mapping[fx.Node, ChannelLayout] = field(default_factory=dict)
    arguments: Mapping[int, Sequence[Any]] = field(default_factory=dict)
    target: Any = None
    adds: bool = False


def layout_of(node: fx.Node, divided: Mapping[fx.Node, Divided]) -> Layouts | None:
    """Return the layout of members' parts of ``node``, or None if ``node`` is whole or members' results are added."""
    found = divided.get(node)
    return None if found is None or found.adds else found.layout


@dataclass(frozen=True)
class OperatorCall:
    """Call of an operator, ``target``, in a graph. ``layouts`` has the layouts of divided operands. ``columns``
    returns, for a weight, the layout (``dim`` 0) of output channels to begin with, or None to leave it whole."""

    node: fx.Node
    target: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    layouts: Mapping[fx.Node, ChannelLayout]
    columns: Callable[[Any], ChannelLayout | None]

    def arg(self, position: int, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else default

    def layout(self, position: int) -> ChannelLayout | None:
        """Return the layout of the operand at ``position``, or None if it is whole."""
        given = self.arg(position)
        return self.layouts.get(given) if isinstance(given, fx.Node) else None

    def sizes(self, position: int = 0) -> Sizes:
        return sizes_of(self.arg(position))

    @property
    def members(self) -> int:
        return len(next(iter(self.layouts.values())).counts)

    def dims(self, given: Any, rank: int) -> list[int]:
        """Return the dimensions ``given`` to an operator on a tensor of ``rank`` dimensions, each counted from 0."""
        every = given if isinstance(given, list | tuple) else [given]
        return [int(dim) % max(rank, 1) for dim in every]


Rule = Callable[[OperatorCall], Divided | None]


def of_first(rule: Callable[[OperatorCall, ChannelLayout], Divided | None]) -> Rule:
    """Make the rule of operators that are divided only if the first operand is. ``rule`` gets that operand's layout."""

    def found(call: OperatorCall) -> Divided | None:
        layout = call.layout(0)
        return None if layout is None else rule(call, layout)

    return found


def sizes_of(node: Any) -> Sizes:
    """Return the sizes of the tensor from ``node``, or none if it is no tensor."""
    found: Any = node.meta.get("sizes", ()) if isinstance(node, fx.Node) else ()
    return tuple(found)


def source_of(size: Size, whole: Iterable[fx.Node]) -> int | tuple[fx.Node, int | None] | None:
    """Return the source of a ``size``: itself, or one of the ``whole`` values and the dimension of a tensor."""
    if isinstance(size, int):
        return size
    for node in whole:
        if node.meta.get("number") == size:
            return node, None
        if size in sizes_of(node):
            return node, list(sizes_of(node)).index(size)
    return None


def size_in(graph: fx.Graph, source: int | tuple[fx.Node, int | None] | None) -> Any:
    """Return the argument, in a call in ``graph``, for a size from ``source``."""
    assert source is not None
    if isinstance(source, int) or source[1] is None:
        return source if isinstance(source, int) else source[0]
    return graph.call_function(torch.ops.aten.sym_size.int, source)
