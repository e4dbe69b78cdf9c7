"""Plan of a segment that a group computes: whole operators, and regions in which each member computes its parts.

A *region* is a run of operators in which members need nothing of each other. An input of a region is whole on each
member, or divided. An output is put together of parts, added up, or kept by members for a later region.

A mask of a dropout is drawn for the whole tensor, with the generator of an unsplit run, and divided.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from lightning_hetpipe.pipeline.random.generators import drawn
from lightning_hetpipe.pipeline.split.joined_graph import JoinedGraph
from lightning_hetpipe.pipeline.split.operator_call import size_in, sizes_of, source_of
from lightning_hetpipe.rules.channel_layouts import ChannelLayout


class TakenAs(Enum):
    """Ways in which a member takes an input of a region."""

    WHOLE = "whole"
    PART = "its part"
    MASK = "its part of a mask"
    STATE = "its part of a buffer, which is written back"
    HELD = "what it has kept of an earlier region"
    DEVICE = "its device"


class GivenAs(Enum):
    """Ways in which members' outputs leave a region."""

    JOINED = "put together"
    ADDED = "added up"
    HELD = "kept by each"


@dataclass(frozen=True)
class RegionInput:
    """One input of a region: a ``node`` in the graph of the segment. ``layout`` is of the members' parts, or None if
    each takes the whole. Members keep parts of parameters (``is_weight``: a tensor of a layer) for each version."""

    node: fx.Node
    taken: TakenAs
    layout: ChannelLayout | None = None
    is_weight: bool = False


@dataclass(frozen=True)
class RegionOutput:
    """One output of a region: a ``node`` in the graph of the segment, with the ``layout`` of members' parts."""

    node: fx.Node
    given: GivenAs
    layout: ChannelLayout


@dataclass(frozen=True)
class Mask:
    """Factor by which a random operation would multiply the whole tensor.

    Attributes:
        arguments: Arguments of the random operation without the tensor.
        sizes: Sizes of the mask. A node stands for a size that may vary, or is a tensor with it in the dimension that
            follows.
        order: Order of its dimensions in memory, in which numbers are drawn.
    """

    arguments: tuple[Any, ...]
    sizes: Sequence[int | tuple[fx.Node, int | None]]
    order: Sequence[int]
    dtype: torch.dtype
    layout: ChannelLayout

    def drawn_in(self, graph: fx.Graph, new: Mapping[fx.Node, fx.Node], device: fx.Node) -> fx.Node:
        """Add operators that draw the mask to ``graph``. ``new`` maps nodes of the sizes to nodes of ``graph``."""
        sizes = [size_in(graph, each if isinstance(each, int) else (new[each[0]], each[1])) for each in self.sizes]
        ones = graph.call_function(_ones_in_order, (sizes, tuple(self.order), self.dtype, device))
        path, ordinal, target, *rest = self.arguments
        return graph.call_function(drawn, (path, ordinal, target, ones, *rest))


def mask_of(node: fx.Node, layout: ChannelLayout, whole: Iterable[fx.Node]) -> Mask | None:
    """Return the mask of random operation ``node`` on a tensor of ``layout``. Return None if the operation is no
    product with a mask, or the ``whole`` values do not determine the mask's sizes."""
    path, ordinal, target, _, *rest = node.args
    sizes, rank = sizes_of(node), len(sizes_of(node))
    if target is torch.ops.aten.feature_dropout.default and layout.dim == 1:
        sizes = [*sizes[:2], *[1] * (rank - 2)]
        order: Any = range(rank)
    elif target is torch.ops.aten.dropout.default:
        order = node.meta.get("order", ())
    else:
        return None
    known = list(whole)
    found = [source_of(size, known) for size in sizes]
    if None in found or len(order) != rank:
        return None
    is_there = [each for each in found if each is not None]
    return Mask((path, ordinal, target, *rest), is_there, tuple(order), node.meta["dtype"], layout)


def _ones_in_order(sizes: Sequence[int], order: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ones, in memory in ``order`` of dimensions."""
    return torch.empty_permuted(list(sizes), tuple(order), dtype=dtype, device=device).fill_(1)


@dataclass
class Region:
    """A region of ``members`` members. Each of the ``graphs`` is a member's. It takes the inputs numbered in ``takes``,
    and returns the outputs numbered in ``gives``."""

    members: int
    inputs: list[RegionInput] = field(default_factory=list)
    outputs: list[RegionOutput] = field(default_factory=list)
    graphs: list[fx.GraphModule] = field(default_factory=list)
    takes: list[list[int]] = field(default_factory=list)
    gives: list[list[int]] = field(default_factory=list)

    def input(self, wanted: RegionInput) -> int:
        """Return the number of the ``wanted`` input, which is added if missing."""
        if wanted not in self.inputs:
            self.inputs.append(wanted)
        return self.inputs.index(wanted)

    def output(self, wanted: RegionOutput) -> None:
        """Add ``wanted`` to the outputs if missing."""
        if wanted not in self.outputs:
            self.outputs.append(wanted)


@dataclass(frozen=True)
class SplitGraph:
    """Graph that a group computes in place of a segment's graph.

    Attributes:
        graph: The segment's graph, with calls of modules "region_0" and so on for members' computations.
        layers: Numbers of units in which each layer may begin to be divided, by its path, the best one first.
    """

    graph: fx.Graph
    regions: dict[str, Region]
    layers: dict[str, tuple[int, ...]]


class MemberGraph:
    """The growing graph of one member in a region."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self._taken: dict[int, fx.Node] = {}

    def taken(self, number: int) -> fx.Node:
        """Return the node of the region's input ``number``."""
        if number not in self._taken:
            with self.graph.inserting_before():
                self._taken[number] = self.graph.placeholder(f"input_{number}")
        return self._taken[number]

    def close(self, region: Region) -> None:
        outputs = [
            (number, self.made[each.node]) for number, each in enumerate(region.outputs) if each.node in self.made
        ]
        self.graph.output(tuple(node for _, node in outputs))
        self.graph.lint()
        names = {node: number for number, node in self._taken.items()}
        region.takes.append([names[node] for node in self.graph.find_nodes(op="placeholder")])
        region.gives.append([number for number, _ in outputs])
        region.graphs.append(fx.GraphModule({}, self.graph))


class OuterGraph:
    """The graph of the segment, with regions in place of members' computations."""

    def __init__(self, joined: JoinedGraph) -> None:
        self._joined = joined
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        self._held: dict[fx.Node, fx.Node] = {}
        for node in joined.graph.find_nodes(op="placeholder"):
            self._new[node] = self._graph.placeholder(node.name)

    def copy(self, node: fx.Node) -> None:
        self._new[node] = self._graph.node_copy(node, self._new.__getitem__)

    def draw(self, node: fx.Node, mask: Mask) -> None:
        """Draw the ``mask`` of ``node``, which stands for ``node`` until the region returns it."""
        self._new[node] = mask.drawn_in(self._graph, self._new, self._new[self._joined.device])

    def call(self, level: int, region: Region) -> None:
        inputs = [(self._held if each.taken is TakenAs.HELD else self._new)[each.node] for each in region.inputs]
        call = self._graph.create_node("call_module", f"region_{level}", tuple(inputs))
        for number, output in enumerate(region.outputs):
            made = self._graph.call_function(operator.getitem, (call, number))
            (self._held if output.given is GivenAs.HELD else self._new)[output.node] = made

    def closed(self) -> fx.Graph:
        output = self._joined.graph.output_node()
        self._graph.output(map_arg(output.args[0], self._new.__getitem__))
        self._graph.lint()
        return self._graph
