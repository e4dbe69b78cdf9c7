"""Layers as data: the graph of each layer, with operators by name, and its tensors.

Decoding runs only torch's operators, a few functions of Python's and ours, and arithmetic. A table names each of them,
or torch has registered it as an operator.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from lightning_hetpipe.pipeline.graph_layer import Code, GraphLayer, LayerGraph, here, own_path
from lightning_hetpipe.pipeline.plain_code import NotPlain
from lightning_hetpipe.pipeline.random.generators import drawn
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.rules.channel_layouts import Size
from lightning_hetpipe.torch_private.graphs import HigherOrderOperator, OperatorOverload

KEYS = {"sizes", "dtype", "order", "several", "all_sizes", "number"}
"""Keys of descriptions."""


def described(value: Any) -> dict[str, Any]:
    """Describe a traced ``value``, for a node's ``meta``. A tensor has ``sizes``, ``dtype`` and the ``order`` of its
    dimensions in memory, the outermost first. Several tensors have their number, ``several``, and ``all_sizes``. A
    number that may vary has ``number``."""
    if isinstance(value, Tensor):
        order = _order(value.stride() if value.layout is torch.strided else ())
        return {"sizes": tuple(map(_size, value.shape)), "dtype": value.dtype, "order": tuple(order)}
    if isinstance(value, list | tuple) and all(isinstance(each, Tensor) for each in value):
        return {"several": len(value), "all_sizes": [tuple(map(_size, each.shape)) for each in value]}
    return {"number": _size(value)} if isinstance(value, torch.SymInt) else {}


def _size(size: Any) -> Size:
    if isinstance(size, int):
        return size
    expression = size.node.expr  # a guard may have reduced it to one number
    return int(expression) if expression.is_Integer else str(expression)


def _order(strides: tuple[Any, ...]) -> list[int]:
    """Return the order of dimensions by their strides. If a stride varies, take its size as traced."""
    hints = [stride if isinstance(stride, int) else int(stride.node.hint) for stride in strides]
    return sorted(range(len(hints)), key=lambda dim: -hints[dim])


_OPERATORS: tuple[str, ...] = ("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg")
_OPERATORS += ("and_", "or_", "not_", "eq", "ne", "lt", "le", "gt", "ge")
_OF_TORCH = ("sym_max", "sym_min", "sym_int", "sym_float", "sym_not", "sym_sum", "sym_ite", "_check")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "drawn": drawn,
    "here": here,
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt")},
    **{f"builtins.{name}": getattr(builtins, name) for name in ("max", "min", "round", "abs")},
    **{f"torch.{name}": getattr(torch, name) for name in _OF_TORCH},
}
"""Functions that graphs call besides operators."""

_NAMES = {function: name for name, function in _FUNCTIONS.items()}

_OF_FILES = ("from_file", "save")
"""Operators that read or write files of the decoding process."""

_ARGUMENTS = (bool, int, float, str, torch.dtype, torch.layout, torch.memory_format, torch.device)
"""Types of arguments in graphs. Torch turns a graph into Python code, in which they are literals."""

_LIBRARIES = ("aten", "prims")
"""Libraries of operators that each process has after it imported torch."""


def layers_as_data(layers: Sequence[Layer], named: Callable[[Tensor], Any] = lambda tensor: tensor) -> list[Any]:
    """Return ``layers``, which are parts of captured graphs, with their present tensors, as plain data.

    The data has ``named(tensor)`` in place of a tensor.

    Raises:
        NotPlain: if a layer has no graph, or the graph calls an operator that is not torch's own.
    """
    tensors: dict[int, Tensor] = {}
    written = [_layer(layer, tensors) for layer in layers]
    held = [(named(tensor), isinstance(tensor, nn.Parameter), tensor.requires_grad) for tensor in tensors.values()]
    return [written, held]


def layers_of_data(
    data: Sequence[Any], found: Callable[[Any], Tensor] | None = None, device: torch.device | None = None
) -> list[Layer]:
    """Return the layers that :func:`layers_as_data` was given. What they shared they share again.

    ``found`` returns the tensor for its replacement in the data. ``device`` is the layers' device, by default the
    previous.

    Raises:
        NotPlain: if the data names what no graph can call.
    """
    written, held = data
    tensors: list[Tensor] = []
    for given, is_parameter, wanted in held:
        tensor = given if isinstance(given, Tensor) or found is None else found(given)
        tensor = tensor if device is None else tensor.to(device)
        tensors.append(nn.Parameter(tensor, wanted) if is_parameter else tensor)
    return [_read_layer(each, tensors, device) for each in written]


def new_variants(layers: Sequence[Layer], known: Sequence[int]) -> list[Any]:
    """Return the variants of the graphs of ``layers`` after the first ``known`` ones of each, as plain data.

    Raises:
        NotPlain: if a graph has no place in a message.
    """
    return [_variants(_code(layer), first) for layer, first in zip(layers, known, strict=True)]


def add_variants(layers: Sequence[Layer], data: Sequence[Any]) -> None:
    """Add the variants from :func:`new_variants`."""
    for layer, written in zip(layers, data, strict=True):
        _add(_code(layer), written)


def _code(layer: Layer) -> Code:
    module = layer.module
    if not isinstance(module, GraphLayer):
        raise NotPlain(f"layer '{layer.name}' is a {type(module).__name__}, which has no graph")
    return module.code


def _layer(layer: Layer, tensors: dict[int, Tensor]) -> dict[str, Any]:
    code, module = _code(layer), layer.module
    assert isinstance(module, GraphLayer)
    held = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for _, tensor in held:
        tensors.setdefault(id(tensor), tensor)
    places = {key: place for place, key in enumerate(tensors)}
    return {
        "name": layer.name,
        "kind": layer.kind,
        "piece": layer.piece,
        "own": [layer.mutates_input, layer.aliases_input, layer.recompute],
        "device": module.device,
        "training": module.training,
        "held": {own_path(name): places[id(tensor)] for name, tensor in held},
        "variants": _variants(code, 0),
    }


def _variants(code: Code, first: int) -> dict[str, Any]:
    return {
        "changes": [own_path(name) for name in sorted(code.changes)],
        "graphs": [
            {
                "own": [own_path(name) if isinstance(name, str) else name for name in own],
                "graph": _graph(graph.module),
                "regions": [_graph(region) for region in graph.regions],
                "outputs": graph.outputs,
            }
            for graph, own in code.variants[first:]
        ],
    }


def _add(code: Code, written: Mapping[str, Any]) -> None:
    for each in written["graphs"]:
        graph = LayerGraph(
            _read_graph(each["graph"]), [_read_graph(region) for region in each["regions"]], each["outputs"]
        )
        code.add(graph, each["own"], written["changes"])


def _read_layer(written: Mapping[str, Any], tensors: list[Tensor], device: torch.device | None) -> Layer:
    module = GraphLayer(device or written["device"])
    module.take({path: tensors[place] for path, place in written["held"].items()})
    module.train(written["training"])
    _add(module.code, written["variants"])
    mutates, aliases, again = written["own"]
    return Layer(
        written["name"], module, mutates, aliases, kind=written["kind"], recompute=again, piece=written["piece"]
    )


def _graph(module: fx.GraphModule) -> dict[str, Any]:
    nodes, held = [], dict[str, Any]()
    for node in module.graph.nodes:
        target = _target(node.target) if node.op == "call_function" else str(node.target)
        if node.op == "get_attr":
            owner, _, attribute = target.rpartition(".")
            value = getattr(module.get_submodule(owner), attribute)
            held[target] = {"graph": _graph(value)} if isinstance(value, fx.GraphModule) else value
        elif node.op not in ("placeholder", "output", "call_function"):
            raise NotPlain(f"a graph that has a node of kind {node.op} has no place in a message")
        arguments = map_aggregate([[*node.args], {**node.kwargs}], _written)
        nodes.append([node.op, node.name, target, *arguments, {key: node.meta[key] for key in node.meta.keys() & KEYS}])
    return {"nodes": nodes, "held": held}


def _read_graph(written: Mapping[str, Any]) -> fx.GraphModule:
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    held = {
        path: _read_graph(value["graph"]) if isinstance(value, dict) else value
        for path, value in written["held"].items()
    }
    for op, name, target, args, kwargs, described in written["nodes"]:
        if op not in ("placeholder", "output", "call_function", "get_attr"):
            raise NotPlain(f"a graph has a node of kind {op}")
        called = _read_target(target) if op == "call_function" else target
        names = [*kwargs, *([] if op == "call_function" else target.split("."))]  # which torch puts into code
        if unfit := [each for each in names if not each.isidentifier() or each.startswith("__")]:
            raise NotPlain(f"a graph has a name {unfit[0]!r}")
        arguments = tuple(_read(args, nodes)), _read(kwargs, nodes)
        nodes[name] = graph.create_node(op, called, *arguments, name=name)
        nodes[name].meta |= {key: described[key] for key in described.keys() & KEYS}
    graph.lint()
    return fx.GraphModule(held, graph)


@functools.cache
def operator_name(operator: OperatorOverload) -> str:
    """Return the name of ``operator`` in messages. Raise NotPlain if it is not one of torch's own."""
    if operator.namespace not in _LIBRARIES:
        raise NotPlain(f"it calls {operator}, which is no operator of torch's own")
    return str(operator.name())  # type: ignore[no-untyped-call]  # torch has no types here


@functools.cache
def operator_of(name: str) -> OperatorOverload:
    """Return the operator called ``name``. Raise NotPlain if it is not one of torch's own."""
    namespace, _, path = name.partition("::")
    packet, _, overload = path.partition(".")
    target = None
    if namespace in _LIBRARIES and packet not in _OF_FILES:
        target = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
    if not isinstance(target, OperatorOverload):
        raise NotPlain(f"{name} is no operator of torch's own")
    return target


def _target(function: Any) -> str:
    if isinstance(function, OperatorOverload):
        return operator_name(function)
    if isinstance(function, HigherOrderOperator):
        return f"higher_order::{function.__name__}"
    if (name := _NAMES.get(function)) is not None:
        return name
    raise NotPlain(f"a graph that calls {function} has no place in a message, as that is no operator of torch's")


def _read_target(name: str) -> Any:
    namespace, found, path = name.partition("::")
    if not found:
        return _FUNCTIONS[name]
    if namespace != "higher_order":
        return operator_of(name)
    target = getattr(torch.ops.higher_order, path)
    if not isinstance(target, HigherOrderOperator):
        raise NotPlain(f"{name} is no operator of torch's")
    return target


def _written(value: Any) -> Any:
    """Return an argument, whatever its nesting, as plain data: a node or an operator becomes a dict."""
    if isinstance(value, fx.Node):
        return {"node": value.name}
    return {"operator": _target(value)} if isinstance(value, OperatorOverload) else value


def _read(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, dict):
        if set(value) == {"node"}:
            return nodes[value["node"]]
        if set(value) == {"operator"}:
            return _read_target(value["operator"])
        return {key: _read(each, nodes) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_read(each, nodes) for each in value)
    if isinstance(value, slice):
        return slice(*(_read(each, nodes) for each in (value.start, value.stop, value.step)))
    if value is None or isinstance(value, _ARGUMENTS):
        return value
    raise NotPlain(f"a graph gives a {type(value).__name__} to what it calls")
