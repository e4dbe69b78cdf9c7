"""Functions of the layers of a captured graph, one for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from lightning_hetpipe.capture.grouping import LayerNodes, alike, at, changed_buffers, groups, path_of
from lightning_hetpipe.pipeline.graph_code import described
from lightning_hetpipe.pipeline.graph_layer import LayerGraph, here
from lightning_hetpipe.pipeline.random.generators import drawn
from lightning_hetpipe.torch_private.graphs import ASSERTS_METADATA, OperatorOverload, arguments_of, outputs_of


@dataclass(frozen=True)
class LayerFunction:
    """One layer of one graph. Paths are in the captured module unless stated otherwise.

    Attributes:
        call: Name of its group.
        name: Path in the LightningModule. A second layer of this path has the mark ":2".
        block: Path of the block to which it belongs.
        kind: Class of the module at its path.
        own: Paths of the tensors (or regions of the graph) that it takes.
        changes: Paths of the tensors that it changes in place.
        graph: What it computes.
    """

    call: str | None
    name: str
    block: str
    kind: str
    own: Sequence[str]
    changes: Sequence[str]
    graph: LayerGraph


def parts(
    graph: fx.GraphModule, module: nn.Module, name: str, device: torch.device, calls: Sequence[str | None] | None = None
) -> list[LayerFunction] | None:
    """Split ``graph`` of ``module`` at path ``name`` into layers. Each hands on everything that a later layer needs.

    If ``calls`` has the groups' names in another graph of the module, ``graph`` is split like it. None if it cannot.
    """
    whole = groups(graph.graph, module)
    found = whole if calls is None else alike(whole, calls)
    modules = dict(module.named_modules(remove_duplicate=False))
    if found is None or not all(group.part in modules for group in found):
        return None
    layer = {node: index for index, group in enumerate(found) for node in group.nodes}
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.graph.nodes if node.op == "output")
    last = len(found) - 1
    until = {
        node: max((layer.get(user, last) for user in node.users if user.op != "call_module"), default=-1)
        for node in (*inputs, *layer)
    }
    firsts = {id(part): path for path, part in module.named_modules()}
    owners = {path: firsts[id(part)] for path, part in modules.items()}
    ordinals: dict[str, int] = {}
    names: dict[str, int] = {}
    given: list[fx.Node] = inputs
    made: list[LayerFunction] = []
    for index, group in enumerate(found):
        kept = [node for node in (*inputs, *layer) if layer.get(node, -1) <= index < until[node]]
        path = ".".join(part for part in (name, group.part) if part)
        names[path] = names.get(path, 0) + 1
        maker = _Maker(graph, given, group, device, partial(_draw, name, owners, ordinals))
        made_of = (tuple(kept), None) if index < last else (output.args[0], outputs_of(graph))
        made.append(
            LayerFunction(
                call=group.call,
                name=path if names[path] == 1 else f"{path}:{names[path]}",
                block=group.block,
                kind=type(modules[group.part]).__name__,
                own=maker.own,
                changes=list(changed_buffers(group.nodes)),
                graph=maker.graph(*made_of),
            )
        )
        given = kept
    return made


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which ``module`` is captured: the device of its tensors."""
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def _draw(name: str, owners: Mapping[str, str], ordinals: dict[str, int], node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of :func:`drawn` that come before the arguments of ``node``, a random operation.

    ``owners`` has the first path of the module at each path, because a shared module has several paths. ``ordinals``
    counts the operations of each module that have drawn so far.
    """
    path = ".".join(filter(None, [name, owners.get(path_of(node), path_of(node))]))
    ordinals[path] = ordinals.get(path, -1) + 1
    return path, ordinals[path], node.target


class _Maker:
    """Maker of the function of one group, which takes the device, the group's own tensors and the values ``given``."""

    def __init__(
        self,
        graph: fx.GraphModule,
        given: Sequence[fx.Node],
        group: LayerNodes,
        device: torch.device,
        draw: Callable[[fx.Node], tuple[Any, ...]],
    ) -> None:
        self.own: list[str] = []
        self._regions: list[fx.GraphModule] = []
        self._captured_on = device
        self._draw = draw
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        sources = (source for node in group.nodes for source in node.all_input_nodes)
        found = {str(node.target): node for node in sources if node.op == "get_attr"}
        held = {path: at(graph, path) for path in found}
        for path, region in held.items():
            if isinstance(region, fx.GraphModule):  # such as what runs under torch.no_grad()
                self._new[found[path]] = self._graph.placeholder(f"region_{len(self._regions)}")
                self._regions.append(region)
        self._device = self._graph.placeholder("layer_device")
        for path in found:
            if not isinstance(held[path], fx.GraphModule):
                self._new[found[path]] = self._graph.placeholder(f"own_{len(self.own)}")
                self._new[found[path]].meta |= described(held[path])
                self.own.append(path)
        for region in self._regions:
            self._prepare(region)
        for node in given:
            self._new[node] = self._graph.placeholder(f"given_{node.name}")
            self._new[node].meta |= described(node.meta.get("val"))
        for node in group.nodes:
            self._new[node] = self._copied(node)

    def graph(self, result: Any, outputs: Any = None) -> LayerGraph:
        self._graph.output(self._mapped(result))
        self._graph.lint()
        return LayerGraph(fx.GraphModule({}, self._graph), self._regions, outputs)

    def _copied(self, node: fx.Node) -> fx.Node:
        args, kwargs = self._mapped(node.args), self._mapped(_keywords(node))
        target: Any = node.target
        if _may_draw(node):
            target, args = drawn, (*self._draw(node), *args)
        made = self._graph.call_function(target, args, kwargs)
        made.meta |= described(node.meta.get("val"))
        return made

    def _prepare(self, region: fx.GraphModule) -> None:
        """Make the operations of a region draw, and create tensors, like other operations."""
        for part in region.modules():
            if isinstance(part, fx.GraphModule):
                self._place(part.graph)
                for node in filter(_may_draw, list(part.graph.nodes)):
                    node.args, node.target = (*self._draw(node), *node.args), drawn
                part.recompile()

    def _place(self, graph: fx.Graph) -> None:
        """Make the operations of a region create tensors on the layer's device."""
        nodes = list(graph.nodes)
        with graph.inserting_before(next(node for node in nodes if node.op != "placeholder")):
            place = graph.call_function(here)

        def placed(value: Any) -> Any:
            return place if isinstance(value, torch.device) and value == self._captured_on else value

        for node in nodes:
            node.args, node.kwargs = map_aggregate(node.args, placed), map_aggregate(_keywords(node), placed)

    def _mapped(self, value: Any) -> Any:
        return map_aggregate(value, self._mapped_leaf)

    def _mapped_leaf(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._new[value]
        # A tensor that the graph makes on the captured device, or moves there, belongs on the layer's device.
        return self._device if isinstance(value, torch.device) and value == self._captured_on else value


def _keywords(node: fx.Node) -> dict[str, Any]:
    """Return the keywords of ``node``. If it makes a tensor from no tensor and names no dtype, add the tensor's dtype.

    Otherwise the process's default dtype would apply, which may differ from ``training_step``'s while a stage runs.
    Assertions about a tensor lose the device, which need not be the layer's.
    """
    if node.target is ASSERTS_METADATA:
        return {name: value for name, value in node.kwargs.items() if name != "device"}
    made, target = node.meta.get("val"), node.target
    if not isinstance(made, Tensor) or not isinstance(target, OperatorOverload) or node.kwargs.get("dtype") is not None:
        return dict(node.kwargs)
    takes_dtype = any(name == "dtype" for name, *_ in arguments_of(target))
    takes_tensors = any(s.op == "get_attr" or isinstance(s.meta.get("val"), Tensor) for s in node.all_input_nodes)
    return {**node.kwargs, "dtype": made.dtype} if takes_dtype and not takes_tensors else dict(node.kwargs)


_INACTIVE = {
    torch.ops.aten.dropout.default: lambda x, p, train: not train or p == 0,
    torch.ops.aten.feature_dropout.default: lambda x, p, train: not train or p == 0,
    torch.ops.aten.scaled_dot_product_attention.default: lambda q, k, v, mask=None, p=0.0, *_, **__: p == 0,
}


def _may_draw(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    target: Any = node.target
    inactive: Any = _INACTIVE.get(target)
    return inactive is None or not inactive(*node.args, **node.kwargs)
