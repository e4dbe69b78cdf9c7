"""Rules of operators that give dimensions another shape, order or number, and what is done over some of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lightning_hetpipe.pipeline.split.operator_call import Divided, OperatorCall, Rule, sizes_of
from lightning_hetpipe.rules.channel_layouts import ChannelLayout


def as_outputs(call: OperatorCall, layout: ChannelLayout) -> Divided:
    """All outputs, of which there may be several, have ``layout``."""
    several = call.node.meta.get("several")
    return Divided((layout,) * several if several else layout, call.layouts)


def over_given(position: int, keyword: str = "dim", default: Any = -1, keep: int | None = None) -> Rule:
    """Something is done over the dimensions at ``position``, which are not divided; they go, unless the argument at
    ``keep`` is true or there is none."""

    def rule(call: OperatorCall) -> Divided | None:
        layout, rank = call.layout(0), len(call.sizes())
        given = call.kwargs.get(keyword, call.arg(position, default))
        if layout is None or given is None or given == [] or len(call.layouts) > 1:
            return None
        dims = call.dims(given, rank)
        if layout.dim in dims:
            return None
        kept = keep is None or call.kwargs.get("keepdim", call.arg(keep, False))
        return as_outputs(call, layout if kept else layout.at(layout.dim - sum(dim < layout.dim for dim in dims)))

    return rule


def view(call: OperatorCall) -> Divided | None:
    layout = call.layout(0)
    found = None if layout is None else layout.reshaped(call.sizes(), sizes_of(call.node))
    if layout is None or found is None:
        return None
    given = call.args[1]
    if not isinstance(given, list | tuple) or (found.outer is None and -1 in given):
        return None
    sizes = [
        [*given[: found.dim], -1 if size is None else size, *given[found.dim + 1 :]]
        for size in map(found.size, range(call.members))
    ]
    arguments = {} if given[found.dim] == -1 else {1: sizes}
    return Divided(found, call.layouts, arguments, torch.ops.aten.reshape.default)


def flatten(call: OperatorCall) -> Divided | None:
    """Flattening needs no sizes: it is the same for the parts, if that is a view of theirs."""
    layout = call.layout(0)
    found = None if layout is None else layout.reshaped(call.sizes(), sizes_of(call.node))
    return None if found is None else Divided(found, call.layouts)


def unflatten(call: OperatorCall) -> Divided | None:
    layout, after = call.layout(0), sizes_of(call.node)
    found = None if layout is None else layout.reshaped(call.sizes(), after)
    if found is None:
        return None
    (first,), given = call.dims(call.args[1], len(call.sizes())), call.args[2]
    place = found.dim - first
    if not 0 <= place < len(given):
        return Divided(found, call.layouts)
    if -1 in given and given[place] != -1:
        return None
    sizes = [found.size(member) for member in range(call.members)]
    changed = [[*given[:place], -1 if size is None else size, *given[place + 1 :]] for size in sizes]
    return Divided(found, call.layouts, {} if given[place] == -1 else {2: changed})


def expand(call: OperatorCall) -> Divided | None:
    layout, given = call.layout(0), call.args[1]
    if layout is None:
        return None
    found = layout.at(layout.dim + len(given) - len(call.sizes()))
    if layout.outer is None and given[found.dim] != -1:
        return None
    sizes = [[*given[: found.dim], found.size(m), *given[found.dim + 1 :]] for m in range(call.members)]
    return Divided(found, call.layouts, {} if given[found.dim] == -1 else {1: sizes})


def reordered(call: OperatorCall) -> Divided | None:
    """Dimensions get another order, which is tried out with a tensor whose sizes tell them apart."""
    layout = call.layout(0)
    if layout is None:
        return None
    tried = call.target(torch.empty([*range(len(call.sizes()))], device="meta"), *call.args[1:], **call.kwargs)
    return Divided(layout.at(list(tried.shape).index(layout.dim)), call.layouts)


def repeat(call: OperatorCall) -> Divided | None:
    """Repeats of other dimensions."""
    layout, times = call.layout(0), call.args[1]
    if layout is None:
        return None
    found = layout.at(layout.dim + len(times) - len(call.sizes()))
    return Divided(found, call.layouts) if times[found.dim] == 1 else None


def unsqueeze(call: OperatorCall) -> Divided | None:
    layout = call.layout(0)
    if layout is None:
        return None
    (dim,) = call.dims(call.args[1], len(call.sizes()) + 1)
    return Divided(layout.at(layout.dim + (dim <= layout.dim)), call.layouts)


def squeeze(call: OperatorCall) -> Divided | None:
    """Only of dimensions that it names, as a part may be of size 1 where the whole is not."""
    layout, sizes = call.layout(0), call.sizes()
    if layout is None or len(call.args) < 2:
        return None
    gone = [dim for dim in call.dims(call.args[1], len(sizes)) if sizes[dim] == 1]
    return (
        None if layout.dim in gone else Divided(layout.at(layout.dim - sum(d < layout.dim for d in gone)), call.layouts)
    )


def split(call: OperatorCall) -> Divided | None:
    """Into parts along another dimension; or along the divided one, where each part has as many of its blocks."""
    layout, parts = call.layout(0), call.node.meta.get("several") or 0
    if layout is None:
        return None
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


def repeat_interleave(call: OperatorCall) -> Divided | None:
    layout, dim = call.layout(0), call.kwargs.get("dim", call.arg(2))
    if layout is None or dim is None or not isinstance(call.args[1], int):
        return None
    same = call.dims(dim, len(call.sizes())) == [layout.dim]
    return Divided(replace(layout, inner=layout.inner * call.args[1]) if same else layout, call.layouts)
