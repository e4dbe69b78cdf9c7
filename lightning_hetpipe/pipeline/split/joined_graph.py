"""Graph of a whole segment: the graphs of its layers in sequence, with operators that members can divide.

If an operator writes into a fresh value without other readers, an operator that returns a new value replaces it. A
group's members hold parts of the new value. Buffers, inputs and values with views are still written in place. Attention
with dropout is replaced by its steps, because only a dropout of its own can draw the mask of the unsplit tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, fx

from lightning_hetpipe.pipeline.graph_layer import GraphLayer, own_path
from lightning_hetpipe.pipeline.random.generators import drawn
from lightning_hetpipe.pipeline.split.operator_call import size_in, sizes_of, source_of
from lightning_hetpipe.torch_private.graphs import (
    ASSERTS_METADATA,
    SAFE_SOFTMAX,
    HigherOrderOperator,
    OperatorOverload,
    written_and_viewed,
)

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.stage import Layer

T = TypeVar("T")

_aten = torch.ops.aten
_ARGUMENTS = ("attn_mask", "dropout_p", "is_causal")

PATHS = "paths"
"""Key in ``meta`` for the paths in the LightningModule of layers' own tensors and of values made only of them."""


@dataclass
class JoinedGraph:
    """Graph of a segment for one variant.

    Attributes:
        graph: Takes the ``regions``, the device, the ``own`` tensors and the values from before.
        own: For each tensor of the layers its node, the number of its layer, and its name there or the tensor itself.
        outputs: Nesting of the last layer's outputs, or None if the next segment takes them flat.
    """

    graph: fx.Graph
    device: fx.Node
    regions: list[fx.GraphModule] = field(default_factory=list)
    own: list[tuple[fx.Node, int, str | Tensor]] = field(default_factory=list)
    outputs: Any = None


def joined_graph(layers: Sequence[Layer], variant: int) -> JoinedGraph:
    """Join the graphs of ``layers``, which follow one another in one captured module."""
    codes = [layer.module.code for layer in layers if isinstance(layer.module, GraphLayer)]
    graphs = [code.graphs[variant] for code in codes]
    inputs = [each.module.graph.find_nodes(op="placeholder") for each in graphs]
    graph, copied = fx.Graph(), dict[fx.Node, Any]()
    regions: list[fx.GraphModule] = []
    for each, nodes in zip(graphs, inputs, strict=True):
        for node, region in zip(nodes, each.regions, strict=False):
            copied[node] = _placeholder(graph, f"region_{len(regions)}", node)
            copied[node].meta["region"] = region
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
                copied[node].meta[PATHS] = {".".join(part for part in (layer.piece, own_path(name)) if part)}
        values.append(rest[len(own) :])
    given: Any = [_placeholder(graph, node.name, node) for node in values[0]]
    for number, (each, nodes) in enumerate(zip(graphs, values, strict=True)):
        copied.update(zip(nodes, given, strict=True))
        for node in each.module.graph.nodes:
            if node.op == "call_function" and node.target is not ASSERTS_METADATA:
                copied[node] = graph.node_copy(node, copied.__getitem__)
                copied[node].meta["of_layer"] = number
            elif node.op == "output":
                given = fx.node.map_arg(node.args[0], copied.__getitem__)
    graph.output(tuple(given))
    _without_writes(graph)
    _unfuse_dropouts(graph, made.device)
    _note_paths(graph, {made.device, *(node for node, _, _ in made.own)})
    graph.lint()
    return made


def _note_paths(graph: fx.Graph, own: set[fx.Node]) -> None:
    """Record the paths of layers' ``own`` tensors on values made only of them, such as a normed weight."""
    for node in graph.nodes:
        given = node.all_input_nodes
        is_made = node.op == "call_function" and given and node.target is not drawn
        if is_made and all(each in own or "region" in each.meta for each in given):
            own.add(node)
            if paths := set().union(*(each.meta.get(PATHS, ()) for each in given)):
                node.meta[PATHS] = paths


def layer_path(weight: fx.Node) -> str | None:
    """Return the path of the layer that has ``weight``, or None if the weight is made of other tensors as well."""
    paths: set[str] = weight.meta.get(PATHS, set())
    if len(paths) < 2:
        return next((each.removesuffix(".weight") for each in paths), None)
    together = [set(level) for level in zip(*(each.split(".") for each in paths), strict=False)]
    common = [*takewhile(lambda level: len(level) == 1, together)]
    return ".".join(part for (part,) in common).partition(".parametrizations")[0] or min(paths)


def _placeholder(graph: fx.Graph, name: str, like: fx.Node) -> fx.Node:
    node = graph.placeholder(name)
    node.meta |= like.meta
    return node


def operator_of_node(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the operator of ``node`` and its arguments. A random operation is unwrapped."""
    if node.target is drawn:
        return node.args[2], node.args[3:]
    return node.target, node.args


def writes_and_views(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the values that ``node`` changes in place, and the values whose memory its output may share."""
    target, args = operator_of_node(node)
    if isinstance(target, HigherOrderOperator):
        given = list(node.all_input_nodes)
        return given if _is_written_in_regions(given) else [], given
    if not isinstance(target, OperatorOverload):  # arithmetic with sizes, but for this one
        return [], list(node.all_input_nodes) if target is operator.getitem else []
    return written_and_viewed(target, args, node.kwargs)


def join_families(one: T, others: Iterable[T], families: dict[T, set[T]]) -> None:
    """Join the families of ``one`` and of the ``others``. ``families`` has the family of each member."""
    together = set[T]().union(*(families.get(each, {each}) for each in (one, *others)))
    families.update(dict.fromkeys(together, together))


def _is_written_in_regions(given: Sequence[fx.Node]) -> bool:
    """Return True if a region among ``given`` may change a value in place, or if there is no region."""
    regions: list[fx.GraphModule] = [each.meta["region"] for each in given if "region" in each.meta]
    inner = [node for region in regions for node in region.graph.nodes if node.op == "call_function"]
    return not regions or any(writes_and_views(node)[0] for node in inner)


def _without_writes(graph: fx.Graph) -> None:
    """Replace writes into values that nobody sees afterwards, not even by a view, by new values."""
    families: dict[fx.Node, set[fx.Node]] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        target, args = operator_of_node(node)
        written, viewed = writes_and_views(node)
        plain = _without_write(target)
        value: Any = args[0] if args else None
        if plain is None or not isinstance(value, fx.Node) or written != [value] or _is_seen(value, node, families):
            join_families(node, viewed, families)  # of values that share memory
            continue
        if node.target is drawn:
            node.update_arg(2, plain)
        else:
            node.target = plain
        users, left = [*_after(node, list(value.users))], node
        if len(node.all_input_nodes) > 1:  # in place it has the dtype of what it is written into
            with graph.inserting_after(node):
                left = graph.call_function(_aten.type_as.default, (node, value))
            left.meta |= node.meta
            node.replace_all_uses_with(left, lambda user, own=left: user is not own)
        for user in users:
            user.replace_input_with(value, left)


def _is_seen(value: fx.Node, node: fx.Node, families: Mapping[fx.Node, set[fx.Node]]) -> bool:
    """Return True if the write of ``node`` into ``value`` shows in an input, or in another view used later."""
    family = families.get(value, {value})
    return any(each.op != "call_function" for each in family) or any(
        any(_after(node, list(each.users))) for each in family - {value}
    )


def _after(node: fx.Node, users: Sequence[fx.Node]) -> Iterator[fx.Node]:
    return (user for user in users if user is not node and node < user)


def _without_write(target: Any) -> Any:
    """Return the out-of-place variant of an operator such as ``add_``, or None."""
    name, _, overload = str(target).removeprefix("aten.").partition(".")
    if not isinstance(target, OperatorOverload) or target.namespace != "aten" or not name.endswith("_"):
        return None
    packet = getattr(_aten, name.removesuffix("_"), None)
    return None if packet is None else getattr(packet, overload, None)


def _unfuse_dropouts(graph: fx.Graph, device: fx.Node) -> None:
    """Replace attention with dropout by products, softmax, and a dropout that draws as the attention did. If several
    heads of queries share a head of keys, leave the attention alone."""
    for node in list(graph.nodes):
        if node.target is drawn and node.args[2] is _aten.scaled_dot_product_attention.default:
            path, ordinal, _, *given = node.args
            named = {**dict(zip(_ARGUMENTS, given[3:], strict=False)), **node.kwargs}
            fixed = len(sizes_of(given[0])) == 4 and isinstance(sizes_of(given[0])[-1], int)
            if fixed and not named.get("enable_gqa", False):
                with graph.inserting_before(node):
                    made = _written_out(graph, device, (path, ordinal), given[:3], named)
                made.meta |= node.meta
                node.replace_all_uses_with(made)
                graph.erase_node(node)


def _written_out(graph: fx.Graph, device: fx.Node, name: Any, operands: Any, named: dict[str, Any]) -> fx.Node:
    query, key, value = operands
    rows, columns = sizes_of(query)[-2], sizes_of(key)[-2]

    def call(target: Any, args: tuple[Any, ...], like: fx.Node, sizes: tuple[Any, ...] = ()) -> fx.Node:
        """Add a call whose result has the dtype of ``like``, and its sizes or other ``sizes``."""
        made, sizes = graph.call_function(target, args), sizes or tuple(sizes_of(like))
        made.meta |= {"sizes": sizes, "dtype": like.meta["dtype"], "order": tuple(range(len(sizes)))}
        return made

    scale = named.get("scale")
    factor = math.sqrt(1 / math.sqrt(int(sizes_of(query)[-1])) if scale is None else scale)
    before = tuple(sizes_of(query)[:-2])
    scaled = call(_aten.mul.Scalar, (query, factor), query)
    turned = call(_aten.transpose.int, (key, -2, -1), key, (*sizes_of(key)[:-2], sizes_of(key)[-1], columns))
    turned = call(_aten.mul.Scalar, (turned, factor), turned)
    scores = call(_aten.matmul.default, (scaled, turned), query, (*before, rows, columns))
    mask = named.get("attn_mask")
    if named.get("is_causal"):
        whole = [each for each in graph.nodes if each.op == "placeholder" or "number" in each.meta]
        numbers = [size_in(graph, source_of(size, whole)) for size in (rows, columns)]
        mask = call(causal_mask, (*numbers, device), query, (rows, columns))
        mask.meta["dtype"] = torch.bool
    if mask is not None and mask.meta.get("dtype") == torch.bool:
        hidden = call(_aten.logical_not.default, (mask,), mask)
        scores = call(_aten.masked_fill.Scalar, (scores, hidden, -math.inf), scores)
    elif mask is not None:
        scores = call(_aten.add.Tensor, (scores, mask), scores)
    weights = call(SAFE_SOFTMAX, (scores, -1), scores)
    dropped = call(drawn, (*name, _aten.dropout.default, weights, named["dropout_p"], True), weights)
    return call(_aten.matmul.default, (dropped, value), query, (*before, rows, sizes_of(value)[-1]))


def causal_mask(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return a mask that is True at the keys a query may see."""
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril()
