"""Call of an operator in a graph, and the way in which members of a group compute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from lightning_hetpipe.rules.channel_layouts import ChannelLayout, Sizes

Layouts = ChannelLayout | tuple[ChannelLayout | None, ...]
"""Layout of an operator's output, or of each of several."""


@dataclass(frozen=True)
class Divided:
    """Way in which members compute an operator.

    Attributes:
        layout: Of what they give; of their addends the layout of the operand that is divided.
        operands: The layouts in which members hold its operands, by node; others are whole.
        arguments: By position, what stands there for each member in place of what the operator is given.
        target: The operator, if it is another one.
        adds: Whether what members give is to be added.
    """

    layout: Layouts
    operands: Mapping[fx.Node, ChannelLayout] = field(default_factory=dict)
    arguments: Mapping[int, Sequence[Any]] = field(default_factory=dict)
    target: Any = None
    adds: bool = False


@dataclass(frozen=True)
class OperatorCall:
    """Call of an operator, ``target``, in a graph.

    Attributes:
        layouts: Of those of its operands that are divided.
        columns: Gives, for a weight, the layout (``dim`` 0) of output channels to begin with; None to leave it whole.
    """

    node: fx.Node
    target: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    layouts: Mapping[fx.Node, ChannelLayout]
    columns: Callable[[Any], ChannelLayout | None]

    def arg(self, position: int, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else default

    def layout(self, position: int) -> ChannelLayout | None:
        """Layout of the operand at ``position``; None if it is whole."""
        given = self.arg(position)
        return self.layouts.get(given) if isinstance(given, fx.Node) else None

    def sizes(self, position: int = 0) -> Sizes:
        return sizes_of(self.arg(position))

    @property
    def members(self) -> int:
        """Number of members of the group."""
        return len(next(iter(self.layouts.values())).counts)

    def dims(self, given: Any, rank: int) -> list[int]:
        """Dimensions that an operator is given, of a tensor of ``rank`` dimensions, each from 0."""
        every = given if isinstance(given, list | tuple) else [given]
        return [int(dim) % max(rank, 1) for dim in every]


Rule = Callable[[OperatorCall], Divided | None]


def of_first(rule: Callable[[OperatorCall, ChannelLayout], Divided | None]) -> Rule:
    """Rule of operators that members divide only if the first operand is divided: ``rule`` is given its layout."""

    def found(call: OperatorCall) -> Divided | None:
        layout = call.layout(0)
        return None if layout is None else rule(call, layout)

    return found


def sizes_of(node: Any) -> Sizes:
    """Sizes of the tensor that ``node`` gives; none for what is no tensor."""
    found: Any = node.meta.get("sizes", ()) if isinstance(node, fx.Node) else ()
    return tuple(found)
