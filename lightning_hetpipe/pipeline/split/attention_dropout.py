"""Attention with dropout, written out: its mask is then one of a tensor in the graph, which can be divided by heads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from lightning_hetpipe.pipeline.random.generators import drawn
from lightning_hetpipe.pipeline.split.masks import size_in, source_of
from lightning_hetpipe.pipeline.split.operator_call import sizes_of
from lightning_hetpipe.torch_private.graphs import SAFE_SOFTMAX

_aten = torch.ops.aten
_ARGUMENTS = ("attn_mask", "dropout_p", "is_causal")


def unfuse_dropouts(graph: fx.Graph, device: fx.Node) -> None:
    """Replace attention with dropout by products, softmax, and a dropout that draws as the attention did.

    It is left alone where several heads of queries share one of keys.
    """
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
    shares = call(SAFE_SOFTMAX, (scores, -1), query, tuple(sizes_of(scores)))
    dropped = call(
        drawn, (*name, _aten.dropout.default, shares, named["dropout_p"], True), query, tuple(sizes_of(scores))
    )
    return call(_aten.matmul.default, (dropped, value), query, (*before, rows, sizes_of(value)[-1]))


def causal_mask(rows: int, columns: int, device: torch.device) -> Tensor:
    """True where a query may look."""
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril()
