"""Buffers that ``forward`` assigns, or writes by ``.data``: its graph writes their values into the buffers in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from lightning_hetpipe.capture.grouping import base_of, written_by
from lightning_hetpipe.capture.plain_attributes import SetsState

_DATA: Any = Tensor.data  # torch has no types for the descriptor
_COPY = torch.ops.aten.copy_.default


class WritesByData(TorchFunctionMode):
    """While a graph is made of ``module``: the ``.data`` of its buffers are views of them, which can be traced."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DATA.__get__ and any(args[0] is buffer for buffer in self._module.buffers()):
            return args[0].detach()
        if func == _DATA.__set__ and any(args[0] is buffer for buffer in self._module.buffers()):
            buffer, value = args
            if buffer.shape == value.shape and buffer.dtype == value.dtype:
                with torch.no_grad():
                    return buffer.copy_(value)
        return func(*args, **(kwargs or {}))


def write_assigned_buffers(
    name: str, graph: fx.GraphModule, buffers: Mapping[str, Tensor], assigned: Collection[str]
) -> None:
    """Write each assigned buffer where its new value is made; ``torch.export`` writes it at the end of ``graph``.

    There, all layers from the first that reads the buffer to the last would be one. Reads of the value before get a
    copy, since autograd may keep it for the backward.

    Args:
        name: The module's path.
        graph: The graph of the module.
        buffers: The module's buffers, by their paths in it.
        assigned: The paths of the buffers that were seen to be assigned.

    Raises:
        PipelineRefusal: for a value that is a view of the buffer, or requires a gradient, and for a buffer that
            ``torch.export`` does not write.
    """
    nodes = graph.graph
    writes = [node for node in nodes.nodes if _is_of_export(node, buffers)]
    if missing := [path for path in assigned if path not in {str(write.args[0].target) for write in writes}]:
        raise replaces_buffer(name, f"{name}.{missing[0]}")
    for write in writes:
        buffer, value = write.args
        if _changed_in_place(value) is buffer:  # as by ``+=``, after which Python assigns what it has changed
            nodes.erase_node(write)
            continue
        if base_of(value) is buffer or value.meta["val"].requires_grad:
            raise replaces_buffer(name, f"{name}.{buffer.target}")
        others = [user for user in buffer.users if user is not write]
        after = value
        if any(buffer in written_by(user) for user in others):
            order = {node: place for place, node in enumerate(nodes.nodes)}
            after = max([value, *others], key=order.__getitem__)
        elif others:
            with nodes.inserting_before(min(others, key=list(nodes.nodes).index)):
                read = nodes.call_function(torch.ops.aten.clone.default, (buffer,))
            read.meta |= {key: others[0].meta[key] for key in ("nn_module_stack",) if key in others[0].meta}
            read.meta["val"] = buffer.meta.get("val", value.meta["val"])
            for user in others:
                user.replace_input_with(buffer, read)
        order = {node: place for place, node in enumerate(nodes.nodes)}
        changes = [n for n in nodes.nodes if n is not write and base_of(value) in map(base_of, written_by(n))]
        after = max([after, *changes], key=order.__getitem__)
        after.append(write)
    nodes.lint()
    graph.recompile()


def _is_of_export(node: fx.Node, buffers: Mapping[str, Tensor]) -> bool:
    """Tell whether ``torch.export`` has added ``node`` for an assigned buffer: it looks like the value."""
    if node.target is not _COPY or node.users:
        return False
    buffer, value = node.args[:2]
    if not isinstance(value, fx.Node) or not isinstance(buffer, fx.Node) or str(buffer.target) not in buffers:
        return False
    return node.meta.get("val") is value.meta.get("val")


def _changed_in_place(node: fx.Node) -> fx.Node:
    """The node whose value ``node`` gives, after changes of it in place."""
    while (written := written_by(node)) and written[0] is node.args[0]:
        node = written[0]
    return node


def replaces_buffer(name: str, path: str) -> SetsState:
    """``forward`` assigns a buffer in a way that no graph can."""
    return SetsState(
        f"'{name}' puts another tensor in the place of its buffer '{path}' in forward, of another shape or dtype, or"
        f" one that requires a gradient or is a view of the buffer; change the buffer in place, as by {path}.copy_()"
    )
