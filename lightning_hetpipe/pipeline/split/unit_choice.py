"""Choice of the units in which a layer's output channels are divided.

Units are single channels, unless later operators need more channels together. Examples are groups of a group norm or a
convolution, halves of a gate, and heads of attention. If several heads of queries share a head of keys and values, that
head is the unit. Fitting units are found by trial: a division is followed through the graph to where it has to arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from lightning_hetpipe.pipeline.split.joined_graph import layer_path
from lightning_hetpipe.pipeline.split.operator_call import Divided, OperatorCall, layout_of, sizes_of
from lightning_hetpipe.pipeline.split.operator_rules import rule_of
from lightning_hetpipe.rules.channel_layouts import ChannelLayout


class Channels(NamedTuple):
    """Units in which the output channels of a layer are divided: ``units`` in each of ``outer`` blocks, of ``inner``
    entries. ``arrives`` is True if what follows, such as an attention, is divided only if these are."""

    outer: int
    units: int
    inner: int
    arrives: bool = False


MOST_FEEDERS = 8
MOST_UNITS = 1024
"""Bounds of the search: attention has three layers before it, and at most some hundred heads."""

_aten = torch.ops.aten
_WEIGHTS = {
    _aten.linear.default: (0, 1, 0),
    _aten.mm.default: (0, 1, 1),
    _aten.matmul.default: (0, 1, 1),
    _aten.addmm.default: (1, 2, 1),
    _aten.embedding.default: (1, 0, 1),
    **{getattr(_aten, f"conv{dims}d").default: (0, 1, 0) for dims in (1, 2, 3)},
    **{getattr(_aten, f"conv{dims}d").padding: (0, 1, 0) for dims in (1, 2, 3)},
    _aten.conv_transpose1d.default: (0, 1, 1),
    _aten.conv_transpose2d.input: (0, 1, 1),
    _aten.conv_transpose3d.input: (0, 1, 1),
}
"""Positions of input and weight, and the weight's dimension of output channels, for each operator that has them."""

_ATTENTION = (_aten.scaled_dot_product_attention.default, _aten.matmul.default, _aten.bmm.default, _aten.einsum.default)
HEAVY = {*_WEIGHTS, *_ATTENTION}
"""Operators with enough work to call members for."""

_PARTS = (_aten.split.Tensor, _aten.chunk.default)
_TOGETHER = (_aten.add.Tensor, _aten.mul.Tensor)


def weight_of(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Return the weight of a layer that may begin to be divided and its number of output channels, or None."""
    if node.target not in _WEIGHTS:
        return None
    _, position, dim = _WEIGHTS[node.target]
    weight = node.args[position]
    if not isinstance(weight, fx.Node) or layer_path(weight) is None:
        return None
    sizes = sizes_of(weight)
    is_matrix = len(sizes) == 2 or "conv" in str(node.target)
    return (weight, int(sizes[dim])) if is_matrix and len(sizes) > dim else None


def input_of(node: fx.Node) -> fx.Node:
    given = node.args[_WEIGHTS[node.target][0]]
    assert isinstance(given, fx.Node)
    return given


def groups_of(node: fx.Node) -> int:
    """Return the groups of a convolution, or 1 for other nodes."""
    groups = node.args[6] if node.target in _WEIGHTS and "conv" in str(node.target) and len(node.args) > 6 else 1
    return groups if isinstance(groups, int) else 1


def chosen_units(graph: fx.Graph) -> dict[fx.Node, Channels]:
    """Return the units of each layer of ``graph`` that has output channels."""
    found: dict[fx.Node, Channels] = {}
    for targets in (_attention, _groups, _parts):
        for target, units in targets(graph):
            feeders, between = _feeders(target)
            if 0 < len(feeders) <= MOST_FEEDERS:
                known = {found[feeder].units for feeder in feeders if feeder in found}
                sizes = [size for node in between for size in sizes_of(node) if isinstance(size, int)]
                choice = known or set(units or [size for size in sizes if 1 < size <= MOST_UNITS])
                found |= _aligned(target, feeders, between, choice, found)
    for node in graph.nodes:  # what is added to, or scales, what has to be in other units than channels
        if node.target in _TOGETHER and found:
            feeders, between = _feeders(node)
            known = {found[feeder].units for feeder in feeders if feeder in found}
            if len(known) == 1 and len(feeders) <= MOST_FEEDERS:
                aligned = _aligned(node, feeders, between, known, found)
                found |= {feeder: own._replace(arrives=feeder in found) for feeder, own in aligned.items()}
    for node in graph.nodes:
        if node.op == "call_function" and (held := weight_of(node)) is not None and node not in found:
            groups = groups_of(node)
            found[node] = Channels(1, held[1], 1) if groups == 1 else Channels(1, groups, held[1] // groups)
    return found


def _attention(graph: fx.Graph) -> Iterator[tuple[fx.Node, Sequence[int]]]:
    for node in graph.nodes:
        if node.target in _ATTENTION and weight_of(node) is None and len(sizes_of(node)) > 2:
            yield node, ()


def _groups(graph: fx.Graph) -> Iterator[tuple[fx.Node, Sequence[int]]]:
    for node in graph.nodes:
        if node.target is _aten.group_norm.default:
            yield node, [node.args[1]]
        elif groups_of(node) > 1:
            yield node, [groups_of(node)]


def _parts(graph: fx.Graph) -> Iterator[tuple[fx.Node, Sequence[int]]]:
    """Yield gates: the output of one layer in parts that are multiplied."""
    for node in graph.nodes:
        if node.target in _PARTS and (sizes := node.meta.get("all_sizes")):
            yield node, [size for size in dict.fromkeys(sizes[0]) if isinstance(size, int)]


def _feeders(target: fx.Node) -> tuple[list[fx.Node], set[fx.Node]]:
    """Return the layers with output channels that ``target`` follows, and the nodes between."""
    feeders: dict[fx.Node, None] = {}
    between: set[fx.Node] = set()
    pending = [target.args[0]] if groups_of(target) > 1 else list(target.all_input_nodes)
    while pending and len(feeders) <= MOST_FEEDERS:
        node = pending.pop()
        if not isinstance(node, fx.Node) or node in between or node in feeders or node.op != "call_function":
            continue
        if weight_of(node) is not None and groups_of(node) == 1:
            feeders[node] = None
        elif rule_of(node.target) is not None or node.meta.get("sizes") is not None:
            between.add(node)
            pending += node.all_input_nodes
    return list(feeders), between


def _aligned(
    target: fx.Node,
    feeders: Sequence[fx.Node],
    between: set[fx.Node],
    choice: set[int],
    found: Mapping[fx.Node, Channels],
) -> dict[fx.Node, Channels]:
    """Find the largest number in ``choice`` into which all ``feeders`` can be divided up to ``target``. Units of some
    feeders are in ``found`` already."""
    order = [node for node in target.graph.nodes if node in between]
    for number in sorted(choice, reverse=True):
        chosen = {
            feeder: found[feeder] if feeder in found else _fitting(feeder, number, order, target) for feeder in feeders
        }
        fitting = {feeder: each for feeder, each in chosen.items() if each is not None}
        if len(fitting) == len(chosen):
            return fitting
    return {}


def _fitting(feeder: fx.Node, units: int, order: Sequence[fx.Node], target: fx.Node) -> Channels | None:
    """Return blocks in which ``feeder`` can be divided so that ``target`` is divided as well."""
    held = weight_of(feeder)
    if held is None or held[1] % units or units < 2:
        return None
    rest = held[1] // units
    for outer in range(1, rest + 1):
        if rest % outer == 0 and _arrives(
            feeder, ChannelLayout(0, outer, rest // outer, (1, units - 1)), order, target
        ):
            return Channels(outer, units, rest // outer, arrives=True)
    return None


def _arrives(feeder: fx.Node, layout: ChannelLayout, order: Sequence[fx.Node], target: fx.Node) -> bool:
    divided: dict[fx.Node, Divided] = {}
    for node in (feeder, *order, target):
        if node.target not in _WEIGHTS and not any(each in divided for each in node.all_input_nodes):
            continue
        found = followed(node, divided, (lambda _: layout) if node is feeder else (lambda _: None))
        if found is None and node is feeder:
            return False
        if node is target:
            return found is not None
        if found is not None:
            divided[node] = found
    return False


def followed(
    node: fx.Node, divided: Mapping[fx.Node, Divided], columns: Callable[[fx.Node], ChannelLayout | None]
) -> Divided | None:
    """Find how members compute ``node``. Nodes before it are ``divided``."""
    own: dict[fx.Node, ChannelLayout] = {}
    for each in node.all_input_nodes:
        layout = layout_of(each, divided)
        if isinstance(layout, tuple):  # of several outputs, of which this takes one
            its = layout[int(str(node.args[1]))] if len(node.args) > 1 else None
            return None if its is None else Divided(its)
        if layout is not None:
            own[each] = layout
    if (rule := rule_of(node.target)) is None or not (own or node.target in _WEIGHTS):
        return None
    return rule(OperatorCall(node, node.target, node.args, node.kwargs, own, columns))
