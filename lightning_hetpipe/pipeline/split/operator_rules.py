"""Table of rules: the effect of each operator on the layouts of its operands.

- Some operators stay divided: elementwise operators, batch and instance norm. So do pooling, padding and resizing of
  other dimensions, layer norm, softmax and sums over other dimensions, and views that keep units whole. Group norm and
  convolutions in groups are divided by whole groups, attention by heads, and products of matrices over dimensions that
  are divided alike.
- Convolutions, linear layers, products with weights and embeddings begin to be divided by output channels, if the
  caller gives counts for their weight (columns).
- Linear layers and products with weights become a sum if their input channels are divided (rows).
- All else is made whole: layer norm or softmax over channels, local response norm, pixel shuffle, operands that are
  divided in unlike ways, and operators in no table.

A rule takes an :class:`OperatorCall`, and returns the computation of each member, or None if members cannot compute
parts. Operands that it does not name are whole on each member.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lightning_hetpipe.pipeline.split.operator_call import Divided, OperatorCall, Rule, of_first, sizes_of
from lightning_hetpipe.rules.channel_layouts import ChannelLayout


def _elementwise(call: OperatorCall) -> Divided | None:
    """Align the operands' dimensions at the last ones, and keep a division that all divided operands share."""
    out = sizes_of(call.node)
    found = {replace(layout, dim=layout.dim + len(out) - len(sizes_of(node))) for node, layout in call.layouts.items()}
    if len(found) != 1:
        return None
    (layout,) = found
    if any(sizes_of(node)[own.dim] != out[layout.dim] for node, own in call.layouts.items()):
        return None  # an operand has one channel for all
    operands = dict(call.layouts)
    for node in call.node.all_input_nodes:
        sizes = sizes_of(node)
        dim = layout.dim - len(out) + len(sizes)
        if node in operands or dim < 0 or sizes[dim] == 1:
            continue
        if sizes[dim] != out[layout.dim]:
            return None
        operands[node] = layout.at(dim)
    return Divided(layout, operands)


@of_first
def _unary(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    """Keep the first operand's layout, whatever the other arguments."""
    return None if len(call.layouts) > 1 else Divided(layout, call.layouts)


def _type_as(call: OperatorCall) -> Divided | None:
    """Follow ``type_as``. If the second operand has the first one's sizes, the first was written into it."""
    return (_elementwise if call.sizes(0) == call.sizes(1) else _unary)(call)


def _over_last(dims: int) -> Rule:
    """Make the rule of an operation on the last ``dims`` dimensions, which must not be divided."""

    @of_first
    def rule(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
        return None if layout.dim >= len(call.sizes()) - dims else _as_outputs(call, layout)

    return rule


@of_first
def _batch_norm(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    if layout.dim != 1:
        return None
    vectors = [each for each in call.args[1:5] if isinstance(each, fx.Node)]
    return Divided(layout, {**call.layouts, **dict.fromkeys(vectors, layout.at(0))})


@of_first
def _group_norm(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    if layout.dim != 1 or layout.outer != 1:
        return None
    size = layout.units * layout.inner // call.args[1]
    counts = [count * layout.inner for count in layout.counts]
    if any(count % size for count in counts):
        return None
    vectors = [each for each in call.args[2:4] if isinstance(each, fx.Node)]
    operands = {**call.layouts, **dict.fromkeys(vectors, layout.at(0))}
    return Divided(layout, operands, {1: [count // size for count in counts]})


@of_first
def _prelu(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    weight = call.args[1]
    if len(call.layouts) > 1:
        return None
    if sizes_of(weight) in ((1,), ()):
        return Divided(layout, call.layouts)
    return Divided(layout, {**call.layouts, weight: layout.at(0)}) if layout.dim == 1 else None


def _convolution(dims: int, *, transposed: bool = False) -> Rule:
    """Make the rule of a convolution, whose weight has output channels first, or second if it is ``transposed``."""

    def rule(call: OperatorCall) -> Divided | None:
        weight, bias, groups = (call.arg(n) for n in (1, 2, 6))
        channel = len(sizes_of(call.node)) - dims - 1
        if "groups" in call.kwargs:  # as in no exported graph
            return None
        if (groups or 1) > 1:
            return None if transposed else _grouped(call, groups, call.layout(0), channel)
        if (found := call.columns(weight)) is None:
            return None
        operands = {weight: found.at(int(transposed)), **({bias: found} if isinstance(bias, fx.Node) else {})}
        return Divided(found.at(channel), operands)

    return rule


def _grouped(call: OperatorCall, groups: int, layout: ChannelLayout | None, channel: int) -> Divided | None:
    """Divide by whole groups: as the input, if each member has whole groups of it, otherwise by the asked counts."""
    image, weight, bias = (call.arg(n) for n in range(3))
    came, channels = sizes_of(image)[channel], sizes_of(weight)[0]
    if not isinstance(came, int) or not isinstance(channels, int):
        return None
    size = came // groups
    asked = call.columns(weight)
    if layout is not None and layout.dim == channel and layout.outer == 1:
        entries = [count * layout.inner for count in layout.counts]
        follows = None if any(each % size for each in entries) else tuple(each // size for each in entries)
    else:
        follows = None
    counts = follows if asked is None or asked.units != groups else asked.counts
    if counts is None:
        return None
    given, made = (ChannelLayout(channel, 1, each, counts) for each in (size, channels // groups))
    vectors = [each for each in (weight, bias) if isinstance(each, fx.Node)]
    operands = {image: layout if follows == counts and layout else given, **dict.fromkeys(vectors, made.at(0))}
    return Divided(made, operands, {6: counts})


def _product(given: int, weight: int, bias: int | None, *, out_first: bool) -> Rule:
    """Make the rule of a product of argument ``given`` with a weight: by columns if there are counts, else by rows."""

    def rule(call: OperatorCall) -> Divided | None:
        matrix, layout = call.arg(weight), call.layout(given)
        if not isinstance(matrix, fx.Node) or len(sizes_of(matrix)) != 2 or matrix in call.layouts:
            return None
        rank, out, into = len(sizes_of(call.node)), 0 if out_first else 1, 1 if out_first else 0
        added = None if bias is None else call.arg(bias)
        if (found := call.columns(matrix)) is not None:
            sizes, operands = sizes_of(added), {matrix: found.at(out)}
            if isinstance(added, fx.Node) and sizes and sizes[-1] == sizes_of(matrix)[out]:  # else one for all channels
                operands[added] = found.at(len(sizes) - 1)
            return Divided(found.at(rank - 1), operands)
        if layout is None or layout.dim != len(call.sizes(given)) - 1:
            return None
        operands = {call.arg(given): layout, matrix: layout.at(into)}
        if added is None or bias is None:
            return Divided(layout, operands, adds=True)
        if not out_first:
            return None  # addmm without what it adds is another operator
        first = layout.members[0]
        return Divided(
            layout, operands, {bias: [added if m == first else None for m in range(call.members)]}, adds=True
        )

    return rule


def _matmul(call: OperatorCall) -> Divided | None:
    """Multiply activations over equally divided dimensions before the last two, or over rows of the first."""
    if (found := _product(0, 1, None, out_first=False)(call)) is not None:
        return found
    rank = len(sizes_of(call.node))
    if any(len(call.sizes(n)) != rank for n in (0, 1)) or not call.layouts:
        return None
    layout = next(iter(call.layouts.values()))
    first, second = call.layout(0), call.layout(1)
    if layout.dim < rank - 2 and all(each in (None, layout) for each in (first, second)):
        wholes = [call.args[n] for n in (0, 1) if call.layout(n) is None]
        sliced = {node: layout for node in wholes if sizes_of(node)[layout.dim] != 1}
        return Divided(layout, {**call.layouts, **sliced})
    if first is not None and second is None and first.dim == rank - 2:
        return Divided(first, call.layouts)
    return None


def _attention(call: OperatorCall) -> Divided | None:
    """Divide by heads, the dimension before the last two. Keys and values may have fewer heads."""
    heads = [call.layout(n) for n in range(3)]
    found = next((each for each in heads if each is not None), None)
    mask, dim = call.kwargs.get("attn_mask", call.arg(3)), len(call.sizes()) - 3
    if found is None or dim < 0 or any(each is not None and each.dim != dim for each in heads):
        return None
    several = bool(call.kwargs.get("enable_gqa", call.arg(7, False)))
    operands: dict[fx.Node, ChannelLayout] = {}
    for n in range(3):
        size, units = call.sizes(n)[dim], found.units
        if not isinstance(size, int) or size % units or (not several and size != call.sizes()[dim]):
            return None
        wanted = ChannelLayout(dim, 1, size // units, found.counts)
        if heads[n] not in (None, wanted):
            return None
        operands[call.args[n]] = wanted
    if isinstance(mask, fx.Node):
        place = len(sizes_of(mask)) - 3
        if place >= 0 and sizes_of(mask)[place] != 1:
            operands[mask] = operands[call.args[0]].at(place)
    return Divided(operands[call.args[0]], operands)


def _einsum(call: OperatorCall) -> Divided | None:
    """Divide by one index. If the result has the index, it stays divided, otherwise members' results are added."""
    equation, operands = str(call.args[0]).replace(" ", ""), call.args[1]
    terms, arrow, result = equation.partition("->")
    indices = dict(zip(operands, terms.split(","), strict=True))
    if not arrow or "." in equation or any(len(set(each)) < len(each) for each in indices.values()):
        return None
    found = {(indices[each][layout.dim], layout.at(0)) for each, layout in call.layouts.items()}
    if len(indices) < len(operands) or len(found) != 1:
        return None
    ((index, layout),) = found
    place = {each: layout.at(own.index(index)) for each, own in indices.items() if index in own}
    if len({sizes_of(each)[own.dim] for each, own in place.items()}) > 1:
        return None  # an operand has one entry for all
    return Divided(layout.at(max(result.find(index), 0)), place, adds=index not in result)


def _embedding(call: OperatorCall) -> Divided | None:
    weight = call.args[0]
    if call.arg(4, False) or (found := call.columns(weight)) is None:
        return None
    return Divided(found.at(len(sizes_of(call.node)) - 1), {weight: found.at(1)})


# Operators that give dimensions another shape, order or number, or that compute over some dimensions.


def _as_outputs(call: OperatorCall, layout: ChannelLayout) -> Divided:
    """Give ``layout`` to all outputs, of which there may be several."""
    several = call.node.meta.get("several")
    return Divided((layout,) * several if several else layout, call.layouts)


def _over_given(position: int, keyword: str = "dim", default: Any = -1, keep: int | None = None) -> Rule:
    """Make the rule of an operation over the dimensions at ``position``, which must not be divided. The dimensions
    vanish, unless the argument at ``keep`` is true or ``keep`` is None."""

    @of_first
    def rule(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
        given = call.kwargs.get(keyword, call.arg(position, default))
        if given is None or given == [] or len(call.layouts) > 1:
            return None
        dims = call.dims(given, len(call.sizes()))
        if layout.dim in dims:
            return None
        kept = keep is None or call.kwargs.get("keepdim", call.arg(keep, False))
        return _as_outputs(call, layout if kept else layout.at(layout.dim - sum(dim < layout.dim for dim in dims)))

    return rule


def _own_sizes(call: OperatorCall, position: int, place: int, layout: ChannelLayout) -> dict[int, Any]:
    """Return members' arguments at ``position``: the sizes, with the size of their part of ``layout`` at ``place``."""
    given, parts = call.args[position], map(layout.size, range(call.members))
    if given[place] == -1:
        return {}
    return {position: [[*given[:place], -1 if size is None else size, *given[place + 1 :]] for size in parts]}


@of_first
def _view(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    """Follow a view, or ``flatten`` without sizes: each part is flattened alike, if that is a view of the part."""
    found, given = layout.reshaped(call.sizes(), sizes_of(call.node)), call.arg(1)
    if found is not None and "flatten" in str(call.target):
        return Divided(found, call.layouts)
    if found is None or not isinstance(given, list | tuple) or (found.outer is None and -1 in given):
        return None
    return Divided(found, call.layouts, _own_sizes(call, 1, found.dim, found), torch.ops.aten.reshape.default)


@of_first
def _unflatten(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    found = layout.reshaped(call.sizes(), sizes_of(call.node))
    if found is None:
        return None
    (first,), given = call.dims(call.args[1], len(call.sizes())), call.args[2]
    place = found.dim - first
    if not 0 <= place < len(given):
        return Divided(found, call.layouts)
    if -1 in given and given[place] != -1:
        return None
    return Divided(found, call.layouts, _own_sizes(call, 2, place, found))


@of_first
def _expand(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    given = call.args[1]
    found = layout.at(layout.dim + len(given) - len(call.sizes()))
    if layout.outer is None and given[found.dim] != -1:
        return None
    return Divided(found, call.layouts, _own_sizes(call, 1, found.dim, found))


@of_first
def _reordered(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    """Reorder dimensions, in an order found by a trial with a tensor of distinct sizes."""
    tried = call.target(torch.empty([*range(len(call.sizes()))], device="meta"), *call.args[1:], **call.kwargs)
    return Divided(layout.at(list(tried.shape).index(layout.dim)), call.layouts)


@of_first
def _repeat(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    """Repeat only other dimensions than the divided one."""
    times = call.args[1]
    found = layout.at(layout.dim + len(times) - len(call.sizes()))
    return Divided(found, call.layouts) if times[found.dim] == 1 else None


@of_first
def _unsqueeze(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    (dim,) = call.dims(call.args[1], len(call.sizes()) + 1)
    return Divided(layout.at(layout.dim + (dim <= layout.dim)), call.layouts)


@of_first
def _squeeze(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    """Remove only named dimensions, because a part may be of size 1 where the whole is not."""
    sizes = call.sizes()
    if len(call.args) < 2:
        return None
    gone = [dim for dim in call.dims(call.args[1], len(sizes)) if sizes[dim] == 1]
    if layout.dim in gone:
        return None
    return Divided(layout.at(layout.dim - sum(dim < layout.dim for dim in gone)), call.layouts)


@of_first
def _split(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    """Split along another dimension, or along the divided one if each part has equally many of its blocks."""
    parts = call.node.meta.get("several") or 0
    (dim,) = call.dims(call.kwargs.get("dim", call.arg(2, 0)), len(call.sizes()))
    if dim != layout.dim:
        return Divided((layout,) * parts, call.layouts)
    sizes = {size[dim] for size in call.node.meta.get("all_sizes", ())}
    if layout.outer is None or len(sizes) != 1 or layout.outer % parts:
        return None
    found = replace(layout, outer=layout.outer // parts)
    each = [[found.size(member) or 0] * parts for member in range(call.members)]
    return Divided((found,) * parts, call.layouts, {1: each}, torch.ops.aten.split_with_sizes.default)


def _cat(call: OperatorCall) -> Divided | None:
    """Join parts that are divided alike along another dimension."""
    nodes = [node for node in call.args[0] if isinstance(node, fx.Node)]
    layouts = {call.layouts.get(node) for node in nodes}
    layout = layouts.pop()
    if layouts or layout is None:
        return None
    (dim,) = call.dims(call.arg(1, 0), len(sizes_of(call.node)))
    if "stack" in str(call.target):
        return Divided(layout.at(layout.dim + (dim <= layout.dim)), call.layouts)
    return Divided(layout, call.layouts) if dim != layout.dim else None


@of_first
def _repeat_interleave(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    dim = call.kwargs.get("dim", call.arg(2))
    if dim is None or not isinstance(call.args[1], int):
        return None
    same = call.dims(dim, len(call.sizes())) == [layout.dim]
    return Divided(replace(layout, inner=layout.inner * call.args[1]) if same else layout, call.layouts)


def _operators(names: str) -> list[Any]:
    """Return all overloads of ``names``, or the named one, without overloads that write into their arguments."""
    named = [name.partition(".") for name in names.split()]
    packets = [(getattr(torch.ops.aten, name, None), only) for name, _, only in named]
    return [
        getattr(packet, overload)
        for packet, only in packets
        if packet is not None
        for overload in packet.overloads()
        if "out" not in overload and only in ("", overload)
    ]


_BY_RULE: list[tuple[Rule, str]] = [
    (_elementwise, "hardswish floor_divide log_sigmoid logsigmoid where dropout expand_as masked_fill polar complex"),
    (_unary, "to _to_copy contiguous alias detach lift_fresh_copy zeros_like ones_like full_like view_as_real"),
    (_type_as, "type_as"),
    (
        _over_last(1),
        "max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d upsample_nearest1d upsample_linear1d"
        " view_as_complex",
    ),
    (_over_last(2), "max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d"),
    (_over_last(2), "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d tril triu"),
    (_over_last(3), "max_pool3d max_pool3d_with_indices avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d"),
    (_over_last(3), "upsample_nearest3d upsample_trilinear3d"),
    (lambda call: _over_last(len(call.args[1]) // 2)(call), "pad constant_pad_nd"),
    (_over_given(1), "softmax _safe_softmax log_softmax cumsum"),
    (_over_given(1, default=None, keep=2), "mean sum amax amin logsumexp"),
    (_over_given(1, default=None, keep=2), "argmax argmin max.dim min.dim any.dim all.dim prod.dim_int"),
    (_over_given(1, default=None, keep=3), "var.dim var.correction std.dim std.correction"),
    (_over_given(2, default=None, keep=3), "linalg_vector_norm"),
    (_over_given(1, default=None), "flip index_select"),
    (_over_given(2, "dims", default=None), "roll"),
    (_batch_norm, "batch_norm instance_norm"),
    (_group_norm, "group_norm"),
    (lambda call: _over_last(len(call.args[1]))(call), "layer_norm rms_norm"),
    (_prelu, "prelu"),
    *[(_convolution(dims), f"conv{dims}d") for dims in (1, 2, 3)],
    *[(_convolution(dims, transposed=True), f"conv_transpose{dims}d") for dims in (1, 2, 3)],
    (_product(0, 1, 2, out_first=True), "linear"),
    (_product(0, 1, None, out_first=False), "mm"),
    (_product(1, 2, 0, out_first=False), "addmm"),
    (_matmul, "matmul bmm"),
    (_attention, "scaled_dot_product_attention"),
    (_einsum, "einsum.default"),
    (_embedding, "embedding"),
    (_view, "view reshape _unsafe_view flatten"),
    (_unflatten, "unflatten"),
    (_expand, "expand"),
    (_reordered, "permute transpose.int swapaxes swapdims movedim moveaxis mT.default t numpy_T.default"),
    (_unsqueeze, "unsqueeze"),
    (_squeeze, "squeeze"),
    (_over_given(1, keep=99), "select"),
    (_over_given(1, default=0), "slice narrow"),
    (_split, "split chunk unsafe_chunk split_with_sizes"),
    (_over_given(1, default=0, keep=99), "unbind"),
    (_cat, "cat stack"),
    (_repeat, "repeat"),
    (_repeat_interleave, "repeat_interleave"),
]
_RULES: dict[Any, Rule] = {operator: rule for rule, names in _BY_RULE for operator in _operators(names)}


def rule_of(target: Any) -> Rule | None:
    """Return the rule of an operator, or None if its operands must be whole."""
    if (found := _RULES.get(target)) is not None:
        return found
    return _elementwise if torch.Tag.pointwise in getattr(target, "tags", ()) else None
