"""Grouping of the nodes of a captured graph into layers.

A layer is a run of nodes of one *block*. A block is a submodule with weights that holds no list of further blocks, such
as one layer of a transformer. A user's block in an ``nn.Sequential``, such as a residual block, is split further. Its
children with weights are layers, each with what the block computes after it. Nodes between blocks go with the block
before. If the whole module is an ``nn.Sequential``, each of its children is a block, with or without weights, as if
stages ran these children.

Runs are joined if a later run would change a value (or a view) of an earlier run in place. Such a value may not cross a
split point.

A *Sequential* only calls its children in order, so its layers are known without a graph. An ``nn.Sequential`` among
them is taken apart.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import fx, nn

from lightning_hetpipe.capture.contents import plain_attributes
from lightning_hetpipe.pipeline.random.generators import may_draw
from lightning_hetpipe.torch_private.graphs import OperatorOverload, written_and_viewed
from lightning_hetpipe.torch_private.modules import has_hooks
from lightning_hetpipe.torch_private.tensors import pytree


def is_plain_sequential(module: nn.Module) -> bool:
    """Return True if ``module`` calls its children in order, as ``nn.Sequential`` does, and the children can be copied.

    They cannot be copied if one holds a module outside of itself, such as the LightningModule.
    """
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    parts = set(module.modules())
    held = (value for part in parts for value in plain_attributes(part).values())
    if any(isinstance(item, nn.Module) and item not in parts for value in held for item in _items(value)):
        return False
    forward = plain_attributes(module).get("forward")
    # A deep copy made while a Redirect stood there has the class's own method instead.
    own = getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward
    return forward is None or own


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else (value,)


def layers_of(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of ``module`` at ``name``, with their paths: itself, if it is no plain Sequential."""
    if not is_plain_sequential(module):
        yield name, module
        return
    for path, child in _children(module, name):
        if is_plain_sequential(child) and not has_hooks(child):
            yield from layers_of(path, child)
        else:
            yield path, child


def is_torchs_own(module: nn.Module) -> bool:
    """Return True if ``module``, and everything in it, belongs to torch.nn, so that it runs no code of the user's."""
    return all(type(part).__module__.startswith("torch.nn.") for part in module.modules())


def has_users_layers(module: nn.Module) -> bool:
    """Return True if a layer of the Sequential ``module`` runs the user's code, which a graph can replace."""
    return not all(is_torchs_own(layer) for _, layer in layers_of("", module))


def shares_draws(module: nn.Module) -> bool:
    """Return True if a module that may draw random numbers is in several layers of the Sequential ``module``.

    The layer names its draws (law L7), but in a graph the module would name them.
    """
    seen, shared = set[nn.Module](), set[nn.Module]()
    for _, layer in layers_of("", module):
        parts = set(layer.modules())
        shared |= seen & parts
        seen |= parts
    return any(map(may_draw, shared))


@dataclass
class LayerNodes:
    """Nodes of a layer, in the order of the graph.

    ``call`` is the path, in the captured module, of its block or of a part of its block. ``within`` is the path of its
    block. Paths of repeated calls have marks.
    """

    call: str | None
    nodes: list[fx.Node] = field(default_factory=list)
    within: str | None = None

    @property
    def part(self) -> str:
        """Path of its block or of the part of its block, without marks. Empty for the captured module itself."""
        return _unmarked(self.call or "")

    @property
    def block(self) -> str:
        """Path of its block, without marks."""
        return _unmarked(self.within or "")


def groups(graph: fx.Graph, module: nn.Module) -> list[LayerNodes]:
    """Return the layers of ``graph``, in order, with all its nodes except inputs, weights and the output."""
    found = _runs(graph, module)
    return _joined(found or [LayerNodes(None)], (span for span, _ in _spans(graph, found)))


def joined_by_buffer(graph: fx.Graph, module: nn.Module) -> tuple[str, list[str]] | None:
    """Return the path of the buffer whose changes join most runs of nodes into one layer, and these runs' paths."""
    found = _runs(graph, module)
    spans = [(last - first, first, last, path) for (first, last), path in _spans(graph, found) if path]
    width, first, last, path = max(spans, default=(0, 0, 0, ""))
    parts = dict.fromkeys(group.part for group in found[first : last + 1])
    return (path, list(filter(None, parts))) if width else None


def _runs(graph: fx.Graph, module: nn.Module) -> list[LayerNodes]:
    """Return the runs of nodes of one block, or of a part of one block, in order."""
    blocks = dict(_blocks(module))
    found: list[LayerNodes] = []
    where: dict[fx.Node, LayerNodes] = {}
    for node in compute_nodes(graph):
        source = node.args[0] if node.args else None
        if _is_a_look(node) and isinstance(source, fx.Node) and source in where:
            group = where[source]
        else:
            block, call = _call_of(_marked_path(node), blocks)
            if not found or _begins(block, call, found[-1]):
                found.append(LayerNodes(call or block, within=block))
            group = found[-1]
            if group.call in (None, group.within):
                group.call, group.within = call or group.call or block, block or group.within
        group.nodes.append(node)
        where[node] = group
    return found


def alike(found: Sequence[LayerNodes], calls: Sequence[str | None]) -> list[LayerNodes] | None:
    """Split ``found`` like another graph of the same module, whose groups have these ``calls``.

    Groups that the other graph lacks are joined with the group before. Groups that only the other graph has are empty.
    Return None if the graph begins otherwise.
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
    """Return the path of the innermost module that runs ``node``."""
    return _unmarked(_marked_path(node))


def marked_paths(graph: fx.Graph) -> list[str]:
    """Return the paths of the modules that run the nodes of ``graph``, in order, with marks on repeated calls."""
    return [path for path, _ in groupby(map(_marked_path, compute_nodes(graph)))]


def called_alike(module: nn.Module, one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Return the paths of the outermost parts of ``module`` with weights that two graphs call alike, in the same order.

    ``one`` and ``other`` are the marked paths of the two graphs.
    """
    found: list[str] = []
    pending = list(reversed(_children(module, "")))
    while pending:
        path, part = pending.pop()
        calls = _calls_in([path], one)
        is_called = calls and not isinstance(part, nn.ModuleList | nn.ModuleDict)
        if is_called and any(True for _ in part.parameters()) and calls == _calls_in([path], other):
            found.append(path)
        else:
            pending += reversed(_children(part, path))
    return found if _calls_in(found, one) == _calls_in(found, other) else []


def _calls_in(parts: Sequence[str], marked: Sequence[str]) -> list[str]:
    return [path for path in marked if any(f"{_unmarked(path)}.".startswith(f"{part}.") for part in parts)]


def _marked_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed(stack.values()))[0]) if stack else ""


def _unmarked(path: str) -> str:
    return re.sub(r"@\d+", "", path)  # so the second call of a module is marked


def _begins(block: str | None, call: str | None, last: LayerNodes) -> bool:
    """Return True if a node of ``call`` in ``block`` begins a new layer after ``last``."""
    if block is None or last.within is None:
        return False
    return block != last.within or (call not in (None, last.call) and last.call != block)


def _blocks(module: nn.Module) -> Iterator[tuple[str, Collection[str]]]:
    """Yield the path of each block in ``module``, with the paths of the parts into which it is split, if any."""
    if not is_plain_sequential(module):
        yield from _blocks_in(module, "", nn.Module)
        return
    for path, layer in layers_of("", module):
        yield from dict(_blocks_in(layer, path, nn.Sequential, listed=True)).items() or [(path, ())]


def _blocks_in(
    module: nn.Module, path: str, holder: type[nn.Module], listed: bool = False
) -> Iterator[tuple[str, Collection[str]]]:
    """Yield the blocks in ``module``, at ``path`` in a ``holder``. ``listed`` is True inside a list of blocks."""
    children = _children(module, path)
    splits = issubclass(holder, nn.Sequential) and not is_torchs_own(module) and not is_plain_sequential(module)
    if path and not any(_is_list(part, listed, least=2 if splits else 1) for part in module.modules()):
        if _has_tensors(module):
            parts = [*_parts(module, path)] if splits else []
            yield path, parts if len(parts) > 1 else ()
    elif children:
        for own, child in children:
            yield from _blocks_in(child, own, type(module), listed or _is_list(module, listed))
    elif _has_tensors(module):
        yield path, ()


def _parts(block: nn.Module, path: str) -> Iterator[str]:
    """Yield the paths of the children of ``block`` with weights, and of the children of a Sequential among them."""
    for own, child in _children(block, path):
        if isinstance(child, nn.Sequential):
            yield from _parts(child, own)
        elif _has_tensors(child):
            yield own


def _children(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    # named_children() would leave out a child that stands in a second position.
    return [
        (f"{path}.{name}" if path else name, child)
        for name, child in module.named_modules(remove_duplicate=False)
        if name and "." not in name
    ]


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))


def _is_list(module: nn.Module, listed: bool, least: int = 1) -> bool:
    """Return True if ``module`` holds modules with weights, one after the other.

    Inside such a list, an ``nn.Sequential`` may be a part of a block: if it has only single layers (a transformer
    layer's MLP, a downsampling), or fewer than ``least`` other modules (a norm, attention and dropout).
    """
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False
    weighty = [child for child in module.children() if any(True for _ in child.parameters())]
    if listed and isinstance(module, nn.Sequential):
        return sum(any(True for _ in child.children()) for child in weighty) >= least
    return bool(weighty)


def _call_of(path: str, blocks: Mapping[str, Collection[str]]) -> tuple[str | None, str | None]:
    """Return the starts of the marked ``path`` that are a block and, if the block is split, a part of it."""
    names = path.split(".")
    prefixes = [".".join(names[:length]) for length in range(1, len(names) + 1)]
    block = next((prefix for prefix in prefixes if _unmarked(prefix) in blocks), None)
    if block is None or not (parts := blocks[_unmarked(block)]):
        return block, block
    return block, next((prefix for prefix in prefixes if _unmarked(prefix) in parts), None)


def _is_a_look(node: fx.Node) -> bool:
    """Return True if ``node`` only takes a part, or a size, of another node's output. It stays with that node."""
    return node.target in (operator.getitem, torch.ops.aten.sym_size.int)


# Values that are changed in place.


def changed_buffers(nodes: Iterable[fx.Node]) -> Iterator[str]:
    """Yield the paths of the buffers that ``nodes`` change in place."""
    for node in nodes:
        bases = [base_of(value) for value in _written_and_viewed(node)[0]]  # a view of a buffer may be changed
        yield from (str(base.target) for base in bases if base.op == "get_attr")


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that ``node`` changes in place."""
    return _written_and_viewed(node)[0] if node.op == "call_function" else []


def base_of(node: fx.Node) -> fx.Node:
    """Return the node that made the memory in which the value of ``node`` lies."""
    while node.op == "call_function" and (isinstance(node.target, OperatorOverload) or _is_a_look(node)):
        viewed = _written_and_viewed(node)[1]
        if not viewed:
            break
        node = viewed[0]
    return node


def _spans(graph: fx.Graph, found: Sequence[LayerNodes]) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield ranges of groups that a change in place joins, with the path of a changed buffer."""
    layer = {node: index for index, group in enumerate(found) for node in group.nodes}
    shares: dict[fx.Node, set[fx.Node]] = {}  # the nodes whose values may lie in the same memory
    for node in compute_nodes(graph):
        written, viewed = _written_and_viewed(node)
        for value in written:
            same, base = shares.setdefault(value, {value}), base_of(value)
            if base.op == "get_attr":  # a buffer: whoever reads it has to be with whoever changes it
                users = [layer[user] for one in same for user in (one, *one.users) if user in layer]
                yield (min(users), max(users)), str(base.target)
            else:
                yield (min([layer[node], *(layer[one] for one in same if one in layer)]), layer[node]), ""
        together = {node}.union(*(shares.setdefault(value, {value}) for value in viewed))
        for one in together:
            shares[one] = together


def _written_and_viewed(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the inputs that ``node`` changes in place, and the inputs whose memory its output may share."""
    if not isinstance(node.target, OperatorOverload):
        # getitem; a region of its own rules may give back what it was given
        return list(_written_in_regions(node)), list(node.all_input_nodes)
    return written_and_viewed(node.target, node.args, node.kwargs)


def _written_in_regions(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the inputs of ``node`` that its regions, such as code under ``torch.no_grad()``, change in place."""
    args = pytree.tree_leaves(node.args)
    nodes = {place: each for place, each in enumerate(args) if isinstance(each, fx.Node) and each.op == "get_attr"}
    held = {place: at(node.graph.owning_module, str(each.target)) for place, each in nodes.items()}
    regions = {place: each for place, each in held.items() if isinstance(each, fx.GraphModule)}
    given = args[max(regions, default=0) + 1 :]
    for region in regions.values():
        written = {base_of(value) for inner in compute_nodes(region.graph) for value in written_by(inner)}
        inputs = region.graph.find_nodes(op="placeholder")
        for value, own in zip(given, inputs, strict=False):
            if own in written and isinstance(value, fx.Node):
                yield value


def at(graph: Any, path: str) -> Any:
    """Return the module or tensor that ``graph`` holds at ``path``."""
    return functools.reduce(getattr, path.split("."), graph)


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
        if target.call is None:
            target.call, target.within = group.call, group.within
        target.nodes += group.nodes
    return list(joined.values())
