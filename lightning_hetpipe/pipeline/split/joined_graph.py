"""Graph of a whole segment: those of its layers, one after the other, with operators that change nothing in place.

What writes into a fresh value that nobody else looks at is made an operator that gives a new one: a group's members
hold parts of it. Buffers, inputs and values with views are still written in place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from lightning_hetpipe.pipeline.graph_layer import GraphLayer, own_path
from lightning_hetpipe.pipeline.random.generators import drawn
from lightning_hetpipe.pipeline.split.attention_dropout import unfuse_dropouts
from lightning_hetpipe.torch_private.graphs import HigherOrderOperator, OperatorOverload, arguments_of

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.stage import Layer


@dataclass
class JoinedGraph:
    """Graph of a segment for one variant.

    Attributes:
        graph: Takes the ``regions``, the device, the ``own`` tensors and the values from before.
        device: The node of the device.
        regions: Of all layers.
        own: For each tensor of the layers' own its node, the number of its layer, and its name there, or itself.
        paths: The path in the LightningModule of each of these that has one.
        outputs: How the last layer's outputs are nested; None where the next segment takes them as they are.
    """

    graph: fx.Graph
    device: fx.Node
    regions: list[fx.GraphModule] = field(default_factory=list)
    own: list[tuple[fx.Node, int, str | Tensor]] = field(default_factory=list)
    paths: dict[fx.Node, str] = field(default_factory=dict)
    outputs: Any = None


def joined_graph(layers: Sequence[Layer], variant: int) -> JoinedGraph:
    """Join the graphs of ``layers``, which follow one another and are parts of one captured module."""
    codes = [layer.module.code for layer in layers if isinstance(layer.module, GraphLayer)]
    graphs = [code.graphs[variant] for code in codes]
    inputs = [each.module.graph.find_nodes(op="placeholder") for each in graphs]
    graph, copied = fx.Graph(), dict[fx.Node, Any]()
    regions: list[fx.GraphModule] = []
    for each, nodes in zip(graphs, inputs, strict=True):
        for node, region in zip(nodes, each.regions, strict=False):
            copied[node] = _placeholder(graph, f"region_{len(regions)}", node)
            regions.append(region)
    made = JoinedGraph(graph, graph.placeholder("layer_device"), regions, outputs=graphs[-1].outputs)
    values: list[list[fx.Node]] = []
    for number, (layer, code, each, nodes) in enumerate(zip(layers, codes, graphs, inputs, strict=True)):
        device, *rest = nodes[len(each.regions) :]
        own = code.variants[variant][1]
        copied[device] = made.device
        for node, name in zip(rest, own, strict=False):
            copied[node] = _placeholder(graph, f"own_{len(made.own)}", node)
            made.own.append((copied[node], number, name))
            if isinstance(name, str):
                made.paths[copied[node]] = ".".join(part for part in (layer.piece, own_path(name)) if part)
        values.append(rest[len(own) :])
    given: Any = [_placeholder(graph, node.name, node) for node in values[0]]
    for number, (each, nodes) in enumerate(zip(graphs, values, strict=True)):
        copied.update(zip(nodes, given, strict=True))
        for node in each.module.graph.nodes:
            if node.op == "call_function":
                copied[node] = graph.node_copy(node, copied.__getitem__)
                copied[node].meta["of_layer"] = number
            elif node.op == "output":
                given = fx.node.map_arg(node.args[0], copied.__getitem__)
    graph.output(tuple(given))
    _without_writes(graph)
    unfuse_dropouts(graph, made.device)
    graph.lint()
    return made


def _placeholder(graph: fx.Graph, name: str, like: fx.Node) -> fx.Node:
    node = graph.placeholder(name)
    node.meta |= like.meta
    return node


def operator_of_node(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Operator that ``node`` runs, and what it is given: a random operation is wrapped in another call."""
    if node.target is drawn:
        return node.args[2], node.args[3:]
    return node.target, node.args


def writes_and_views(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The values that ``node`` changes in place, and those whose memory its output may share."""
    target, args = operator_of_node(node)
    if isinstance(target, HigherOrderOperator):  # nobody knows what its regions do with what they are given
        return list(node.all_input_nodes), list(node.all_input_nodes)
    if not isinstance(target, OperatorOverload):  # arithmetic with sizes, but for this one
        return [], list(node.all_input_nodes) if target is operator.getitem else []
    written: list[fx.Node] = []
    viewed: list[fx.Node] = []
    for position, (name, shares, changes) in enumerate(arguments_of(target)):
        value = args[position] if position < len(args) else node.kwargs.get(name)
        nodes = [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, fx.Node)]
        viewed += nodes if shares or (name == "input" and "dropout" in str(target)) else []
        written += nodes if changes or name in ("running_mean", "running_var") else []
    return written, viewed


def _without_writes(graph: fx.Graph) -> None:
    """Replaces what writes into a value of which there is no view by what gives a new one."""
    viewed: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        target, args = operator_of_node(node)
        written, shared = writes_and_views(node)
        plain = _without_write(target)
        value: Any = args[0] if args else None
        is_written = plain is not None and isinstance(value, fx.Node) and written == [value]
        if not is_written or value in viewed or value.op != "call_function" or writes_and_views(value)[1]:
            viewed.update(shared, written)
            continue
        if node.target is drawn:
            node.update_arg(2, plain)
        else:
            node.target = plain
        users, left = [*_after(node, list(value.users))], node
        if len(node.all_input_nodes) > 1:  # in place it has the dtype of what it is written into
            with graph.inserting_after(node):
                left = graph.call_function(torch.ops.aten.type_as.default, (node, value))
            left.meta |= node.meta
            node.replace_all_uses_with(left, lambda user, own=left: user is not own)
        for user in users:
            user.replace_input_with(value, left)


def _after(node: fx.Node, users: Sequence[fx.Node]) -> Iterator[fx.Node]:
    return (user for user in users if user is not node and node < user)


def _without_write(target: Any) -> Any:
    """The operator that gives a new value, for one such as ``add_``; None if there is none."""
    name, _, overload = str(target).removeprefix("aten.").partition(".")
    if not isinstance(target, OperatorOverload) or target.namespace != "aten" or not name.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    return None if packet is None else getattr(packet, overload, None)
