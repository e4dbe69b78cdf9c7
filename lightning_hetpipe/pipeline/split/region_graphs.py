"""Graphs that a segment's is rewritten into: what a member computes in a region, and what calls the regions."""

from __future__ import annotations

import operator

from torch import fx
from torch.fx.node import map_arg

from lightning_hetpipe.pipeline.split.joined_graph import JoinedGraph
from lightning_hetpipe.pipeline.split.masks import Mask
from lightning_hetpipe.pipeline.split.regions import GivenAs, Region, RegionInput, TakenAs


class MemberGraph:
    """The graph of one member in a region, which grows."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self._taken: dict[int, fx.Node] = {}

    def taken(self, number: int) -> fx.Node:
        """Node of the region's input ``number``."""
        if number not in self._taken:
            with self.graph.inserting_before():
                self._taken[number] = self.graph.placeholder(f"input_{number}")
        return self._taken[number]

    def close(self, region: Region, member: int) -> None:
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
    """The graph of the segment, with regions in place of what members compute."""

    def __init__(self, joined: JoinedGraph) -> None:
        self._joined = joined
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        self._held: dict[fx.Node, fx.Node] = {}
        self._masks: dict[fx.Node, fx.Node] = {}
        for node in joined.graph.find_nodes(op="placeholder"):
            self._new[node] = self._graph.placeholder(node.name)

    def copy(self, node: fx.Node) -> None:
        self._new[node] = self._graph.node_copy(node, self._new.__getitem__)

    def draw(self, node: fx.Node, mask: Mask) -> None:
        self._masks[node] = mask.drawn_in(self._graph, self._new, self._new[self._joined.device])

    def call(self, level: int, region: Region) -> None:
        inputs = [self._given(each) for each in region.inputs]
        call = self._graph.create_node("call_module", f"region_{level}", tuple(inputs))
        for number, output in enumerate(region.outputs):
            made = self._graph.call_function(operator.getitem, (call, number))
            (self._held if output.given is GivenAs.HELD else self._new)[output.node] = made

    def _given(self, wanted: RegionInput) -> fx.Node:
        if wanted.taken is TakenAs.MASK:
            return self._masks[wanted.node]
        return self._held[wanted.node] if wanted.taken is TakenAs.HELD else self._new[wanted.node]

    def closed(self) -> fx.Graph:
        output = self._joined.graph.output_node()
        self._graph.output(map_arg(output.args[0], self._new.__getitem__))
        self._graph.lint()
        return self._graph
