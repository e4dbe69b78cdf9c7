"""Grouping of the nodes of a captured graph into layers.

A layer is a run of nodes of one *block*: a submodule with weights that holds no list of further blocks, such as one
layer of a transformer. What runs between blocks goes with the block before it. Runs are joined where a later one would
change in place what an earlier one has made (or a view of it): such a value may not cross a split point.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from lightning_hetpipe.torch_private import OperatorOverload, arguments_of


@dataclass
class LayerNodes:
    """A layer's nodes, in order.

    Attributes:
        call: The path of its block in the captured module, with a mark where that is called again.
        nodes: In the order of the graph.
    """

    call: str | None
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def block(self) -> str:
        """The path of its block; empty for the captured module itself."""
        return _unmarked(self.call or "")


def groups(graph: fx.Graph, module: nn.Module) -> list[LayerNodes]:
    """The layers of ``graph``, in order, with all its nodes but inputs, weights and the output."""
    blocks = set(_blocks(module))
    found: list[LayerNodes] = []
    where: dict[fx.Node, LayerNodes] = {}
    for node in compute_nodes(graph):
        source = node.args[0] if node.args else None
        if _is_a_look(node) and isinstance(source, fx.Node) and source in where:
            group = where[source]
        else:
            call = _call_of(_marked_path(node), blocks)
            if not found or (call is not None and found[-1].call not in (call, None)):
                found.append(LayerNodes(call))
            group = found[-1]
            group.call = call if group.call is None else group.call
        group.nodes.append(node)
        where[node] = group
    return _joined(found or [LayerNodes(None)], _spans(graph, found))


def alike(found: Sequence[LayerNodes], calls: Sequence[str | None]) -> list[LayerNodes] | None:
    """Split ``found`` where another graph of the same module is split, whose groups have these ``calls``.

    Groups that the other one lacks are joined with those before; those that only the other one has are empty.

    Returns:
        None if that cannot be, as the graph begins otherwise.
    """
    split: list[LayerNodes] = []
    for group in found:
        if group.call in calls[len(split) :]:
            split += [LayerNodes(call) for call in calls[len(split) : calls.index(group.call, len(split)) + 1]]
        if not split:
            return None
        split[-1].nodes += group.nodes
    return split + [LayerNodes(call) for call in calls[len(split) :]]


def compute_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "call_function")


def path_of(node: fx.Node) -> str:
    """The path of the innermost module that runs ``node``."""
    return _unmarked(_marked_path(node))


def _marked_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed(stack.values()))[0]) if stack else ""


def _unmarked(path: str) -> str:
    return re.sub(r"@\d+", "", path)  # so the second call of a module is marked


def _blocks(module: nn.Module, path: str = "", listed: bool = False) -> Iterator[str]:
    """The paths of the blocks in ``module``, at ``path``; ``listed`` if it is inside a list already."""
    children = [
        (name, child) for name, child in module.named_modules(remove_duplicate=False) if name and "." not in name
    ]
    if path and not any(_is_list(part, listed) for part in module.modules()):
        children = []
    if children:
        for name, child in children:
            yield from _blocks(child, f"{path}.{name}" if path else name, listed or _is_list(module, listed))
    elif any(True for _ in (*module.parameters(), *module.buffers())):
        yield path


def _is_list(module: nn.Module, listed: bool) -> bool:
    """Tell whether it holds modules with weights, one after the other.

    Inside such a list, an ``nn.Sequential`` of nothing but single layers (a transformer layer's MLP, a downsampling) is
    a part of a block.
    """
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False
    weighty = [child for child in module.children() if any(True for _ in child.parameters())]
    if listed and isinstance(module, nn.Sequential):
        return any(True for child in weighty for _ in child.children())
    return bool(weighty)


def _call_of(path: str, blocks: set[str]) -> str | None:
    """The start of the marked ``path`` that is a block."""
    parts = path.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return next((prefix for prefix in prefixes if _unmarked(prefix) in blocks), None)


def _is_a_look(node: fx.Node) -> bool:
    """Tell whether ``node`` only picks a part, or a size, of another node's output: it goes where that is."""
    return node.target in (operator.getitem, torch.ops.aten.sym_size.int)


# Values that are changed in place.


def changed_buffers(nodes: Iterable[fx.Node]) -> Iterator[str]:
    """The paths of the buffers that ``nodes`` change in place."""
    for node in nodes:
        yield from (str(value.target) for value in _written_and_viewed(node)[0] if value.op == "get_attr")


def written_by(node: fx.Node) -> list[fx.Node]:
    """The inputs that ``node`` changes in place."""
    return _written_and_viewed(node)[0] if node.op == "call_function" else []


def base_of(node: fx.Node) -> fx.Node:
    """The node that has made the memory in which the value of ``node`` lies."""
    while node.op == "call_function" and (isinstance(node.target, OperatorOverload) or _is_a_look(node)):
        viewed = _written_and_viewed(node)[1]
        if not viewed:
            break
        node = viewed[0]
    return node


def _spans(graph: fx.Graph, found: Sequence[LayerNodes]) -> Iterator[tuple[int, int]]:
    """Ranges of groups that belong together, as one changes in place what another has made."""
    layer = {node: index for index, group in enumerate(found) for node in group.nodes}
    shares: dict[fx.Node, set[fx.Node]] = {}  # the nodes whose values may lie in the same memory
    for node in compute_nodes(graph):
        written, viewed = _written_and_viewed(node)
        for value in written:
            same = shares.setdefault(value, {value})
            if value.op == "get_attr":  # a buffer: whoever reads it has to be with whoever changes it
                users = [layer[user] for one in same for user in (one, *one.users) if user in layer]
                yield min(users), max(users)
            else:
                yield min([layer[node], *(layer[one] for one in same if one in layer)]), layer[node]
        together = {node}.union(*(shares.setdefault(value, {value}) for value in viewed))
        for one in together:
            shares[one] = together


def _written_and_viewed(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The inputs that ``node`` changes in place, and those whose memory its output may share."""
    if not isinstance(node.target, OperatorOverload):
        return [], list(node.all_input_nodes)  # getitem; a region of its own rules may give back what it was given
    written: list[fx.Node] = []
    viewed: list[fx.Node] = []
    for index, (name, shares, changes) in enumerate(arguments_of(node.target)):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(name)
        nodes = [one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, fx.Node)]
        if shares or (name == "input" and "dropout" in str(node.target)):  # which may give back what it was given
            viewed += nodes
        if changes or name in _STATISTICS:
            written += nodes
    return written, viewed


_STATISTICS = ("running_mean", "running_var")
"""Arguments that batch and instance norm change in place, though their schema does not say so."""


def _joined(found: Sequence[LayerNodes], spans: Iterator[tuple[int, int]]) -> list[LayerNodes]:
    together = list(range(len(found)))  # for each group the first one that it is joined with
    for first, last in spans:
        start = together[first]
        for index in range(first, len(together)):
            if index <= last or together[index] in together[first : last + 1]:
                together[index] = start
    joined: dict[int, LayerNodes] = {}
    for index, group in enumerate(found):
        target = joined.setdefault(together[index], LayerNodes(None))
        target.call = group.call if target.call is None else target.call
        target.nodes += group.nodes
    return list(joined.values())
