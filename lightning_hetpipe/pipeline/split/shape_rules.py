"""Rules of operators that give dimensions another shape, order or number, and what is done over some of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lightning_hetpipe.pipeline.split.operator_call import Divided, OperatorCall, Rule, of_first, sizes_of
from lightning_hetpipe.rules.channel_layouts import ChannelLayout


def as_outputs(call: OperatorCall, layout: ChannelLayout) -> Divided:
    """All outputs, of which there may be several, have ``layout``."""
    several = call.node.meta.get("several")
    return Divided((layout,) * several if several else layout, call.layouts)


def over_given(position: int, keyword: str = "dim", default: Any = -1, keep: int | None = None) -> Rule:
    """Something is done over the dimensions at ``position``, which are not divided; they go, unless the argument at
    ``keep`` is true or there is none."""

    @of_first
    def rule(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
        given = call.kwargs.get(keyword, call.arg(position, default))
        if given is None or given == [] or len(call.layouts) > 1:
            return None
        dims = call.dims(given, len(call.sizes()))
        if layout.dim in dims:
            return None
        kept = keep is None or call.kwargs.get("keepdim", call.arg(keep, False))
        return as_outputs(call, layout if kept else layout.at(layout.dim - sum(dim < layout.dim for dim in dims)))

    return rule


def _own_sizes(call: OperatorCall, position: int, place: int, layout: ChannelLayout) -> dict[int, Any]:
    """Arguments of members: the sizes at ``position``, with the size of each one's part of ``layout`` at ``place``."""
    given, parts = call.args[position], map(layout.size, range(call.members))
    if given[place] == -1:
        return {}
    return {position: [[*given[:place], -1 if size is None else size, *given[place + 1 :]] for size in parts]}


@of_first
def view(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    found, given = layout.reshaped(call.sizes(), sizes_of(call.node)), call.args[1]
    if found is None or not isinstance(given, list | tuple) or (found.outer is None and -1 in given):
        return None
    return Divided(found, call.layouts, _own_sizes(call, 1, found.dim, found), torch.ops.aten.reshape.default)


@of_first
def flatten(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    """Flattening needs no sizes: it is the same for the parts, if that is a view of theirs."""
    found = layout.reshaped(call.sizes(), sizes_of(call.node))
    return None if found is None else Divided(found, call.layouts)


@of_first
def unflatten(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
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
def expand(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    given = call.args[1]
    found = layout.at(layout.dim + len(given) - len(call.sizes()))
    if layout.outer is None and given[found.dim] != -1:
        return None
    return Divided(found, call.layouts, _own_sizes(call, 1, found.dim, found))


@of_first
def reordered(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    """Dimensions get another order, which is tried out with a tensor whose sizes tell them apart."""
    tried = call.target(torch.empty([*range(len(call.sizes()))], device="meta"), *call.args[1:], **call.kwargs)
    return Divided(layout.at(list(tried.shape).index(layout.dim)), call.layouts)


@of_first
def repeat(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    """Repeats of other dimensions."""
    times = call.args[1]
    found = layout.at(layout.dim + len(times) - len(call.sizes()))
    return Divided(found, call.layouts) if times[found.dim] == 1 else None


@of_first
def unsqueeze(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    (dim,) = call.dims(call.args[1], len(call.sizes()) + 1)
    return Divided(layout.at(layout.dim + (dim <= layout.dim)), call.layouts)


@of_first
def squeeze(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    """Only of dimensions that it names, as a part may be of size 1 where the whole is not."""
    sizes = call.sizes()
    if len(call.args) < 2:
        return None
    gone = [dim for dim in call.dims(call.args[1], len(sizes)) if sizes[dim] == 1]
    if layout.dim in gone:
        return None
    return Divided(layout.at(layout.dim - sum(dim < layout.dim for dim in gone)), call.layouts)


@of_first
def split(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    """Into parts along another dimension; or along the divided one, where each part has as many of its blocks."""
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


def cat(call: OperatorCall) -> Divided | None:
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
def repeat_interleave(call: OperatorCall, layout: ChannelLayout) -> Divided | None:
    dim = call.kwargs.get("dim", call.arg(2))
    if dim is None or not isinstance(call.args[1], int):
        return None
    same = call.dims(dim, len(call.sizes())) == [layout.dim]
    return Divided(replace(layout, inner=layout.inner * call.args[1]) if same else layout, call.layouts)
