"""Masks of dropout for a group: drawn for the whole tensor, with the generator of an unsplit run, and divided."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lightning_hetpipe.pipeline.random.generators import drawn
from lightning_hetpipe.pipeline.split.operator_call import sizes_of
from lightning_hetpipe.rules.channel_layouts import ChannelLayout, Size
from lightning_hetpipe.torch_private.graphs import SAFE_SOFTMAX

_ELEMENTS = torch.ops.aten.dropout.default
_CHANNELS = torch.ops.aten.feature_dropout.default


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
        ones = graph.call_function(ones_in_order, (sizes, tuple(self.order), self.dtype, device))
        path, ordinal, target, *rest = self.arguments
        return graph.call_function(drawn, (path, ordinal, target, ones, *rest))


def mask_of(node: fx.Node, layout: ChannelLayout, whole: Iterable[fx.Node]) -> Mask | None:
    """Return the mask of random operation ``node`` on a tensor of ``layout``. Return None if the operation is no
    product with a mask, or the ``whole`` values do not determine the mask's sizes."""
    path, ordinal, target, _, *rest = node.args
    sizes, rank = sizes_of(node), len(sizes_of(node))
    if target is _CHANNELS and layout.dim == 1:
        sizes = [*sizes[:2], *[1] * (rank - 2)]
        order: Any = range(rank)
    elif target is _ELEMENTS:
        order = node.meta.get("order", ())
    else:
        return None
    known = list(whole)
    found = [source_of(size, known) for size in sizes]
    if None in found or len(order) != rank:
        return None
    is_there = [each for each in found if each is not None]
    return Mask((path, ordinal, target, *rest), is_there, tuple(order), node.meta["dtype"], layout)


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


def ones_in_order(sizes: Sequence[int], order: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ones, in memory in ``order`` of dimensions."""
    return torch.empty_permuted(list(sizes), tuple(order), dtype=dtype, device=device).fill_(1)


_aten = torch.ops.aten
_ARGUMENTS = ("attn_mask", "dropout_p", "is_causal")


def unfuse_dropouts(graph: fx.Graph, device: fx.Node) -> None:
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

    def call(target: Any, args: tuple[Any, ...], like: fx.Node, sizes: tuple[Any, ...]) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta |= {"sizes": sizes, "dtype": like.meta["dtype"], "order": tuple(range(len(sizes)))}
        return made

    scale = named.get("scale")
    factor = math.sqrt(1 / math.sqrt(int(sizes_of(query)[-1])) if scale is None else scale)
    before = tuple(sizes_of(query)[:-2])
    scaled = call(_aten.mul.Scalar, (query, factor), query, tuple(sizes_of(query)))
    turned = call(_aten.transpose.int, (key, -2, -1), key, (*sizes_of(key)[:-2], sizes_of(key)[-1], columns))
    turned = call(_aten.mul.Scalar, (turned, factor), key, tuple(sizes_of(turned)))
    scores = call(_aten.matmul.default, (scaled, turned), query, (*before, rows, columns))
    mask = named.get("attn_mask")
    if named.get("is_causal"):
        whole = [each for each in graph.nodes if each.op == "placeholder" or "number" in each.meta]
        numbers = [size_in(graph, source_of(size, whole)) for size in (rows, columns)]
        mask = call(causal_mask, (*numbers, device), query, (rows, columns))
        mask.meta["dtype"] = torch.bool
    if mask is not None and mask.meta.get("dtype") == torch.bool:
        hidden = call(_aten.logical_not.default, (mask,), mask, tuple(sizes_of(mask)))
        scores = call(_aten.masked_fill.Scalar, (scores, hidden, -math.inf), query, tuple(sizes_of(scores)))
    elif mask is not None:
        scores = call(_aten.add.Tensor, (scores, mask), query, tuple(sizes_of(scores)))
    weights = call(SAFE_SOFTMAX, (scores, -1), query, tuple(sizes_of(scores)))
    dropped = call(
        drawn, (*name, _aten.dropout.default, weights, named["dropout_p"], True), query, tuple(sizes_of(scores))
    )
    return call(_aten.matmul.default, (dropped, value), query, (*before, rows, sizes_of(value)[-1]))


def causal_mask(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return a mask that is True at the keys a query may see."""
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril()
