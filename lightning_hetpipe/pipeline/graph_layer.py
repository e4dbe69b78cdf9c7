"""One layer of a captured model: a part of its graph, and the weights and buffers that this part reads.

Between two layers passes one tuple: the number of the graph's variant, then every value that a later layer needs. The
code of a layer is shared by its copies; weights and buffers are each copy's own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from lightning_hetpipe.accelerator import is_initialized
from lightning_hetpipe.torch_private.tensors import pytree

Run = Callable[..., Any]
"""Takes the variant's number, the device, the layer's own tensors and the values from before; gives the next ones."""


class _ThreadDevice(threading.local):
    device: torch.device | None = None


_here = _ThreadDevice()


def here() -> torch.device:
    """The device of the layer that runs in this thread, for regions of its graph, to which nobody hands it."""
    if _here.device is not None:
        return _here.device
    # One of autograd's threads, which computes a region again: it has one for each GPU, and its device is that.
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not is_initialized():
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def set_here(device: torch.device) -> None:
    """From now on layers that run in this thread are on ``device``."""
    _here.device = device


@dataclass(frozen=True)
class LayerGraph:
    """Graph of the computation of one layer.

    Attributes:
        module: Takes the ``regions``, the device, the layer's own tensors and the values from before.
        regions: Parts of the graph that operators are given, such as what runs under ``torch.no_grad()``.
        outputs: Of the last layer, how the outputs are nested; None where the next layer takes them as they are.
    """

    module: fx.GraphModule
    regions: Sequence[fx.GraphModule]
    outputs: Any = None

    @property
    def text(self) -> str:
        """As code."""
        return "\n".join(each.code for each in (self.module, *self.regions))

    def run(self) -> Run:
        """Computes it."""
        run, outputs = functools.partial(self.module.forward, *self.regions), self.outputs

        def passing_on(variant: int, *values: Any) -> Any:
            return (variant, *run(*values))

        def nested(variant: int, *values: Any) -> Any:
            return pytree.tree_unflatten(list(run(*values)), outputs)

        return passing_on if outputs is None else nested


class Code:
    """Code that a layer and its copies run.

    Attributes:
        variants: For each variant of the graph the function, and the names of the layer's tensors that it takes; a
            constant that only this variant has is there itself.
        changes: The names of the buffers that one of them changes in place.
        graphs: What each variant computes, where that is a graph.
        named: What holds tensors that the captured module does not, for people.
    """

    def __init__(self) -> None:
        self.variants: list[tuple[Run, Sequence[str | Tensor]]] = []
        self.changes: set[str] = set()
        self.graphs: list[LayerGraph] = []
        self.named: dict[str, str] = {}

    def clear(self) -> None:
        self.variants.clear()
        self.changes.clear()
        self.graphs.clear()

    def add_graph(self, graph: LayerGraph, own: Sequence[str | Tensor], changes: Sequence[str]) -> None:
        """Adds a variant; paths are those in the captured module, and a tensor is a constant."""
        self.graphs.append(graph)
        self.add(graph.run(), own, changes)

    def add(self, run: Run, own: Sequence[str | Tensor], changes: Sequence[str]) -> None:
        """Adds one that is a function."""
        self.variants.append((run, [own_name(each) if isinstance(each, str) else each for each in own]))
        self.changes.update(own_name(path) for path in changes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class GraphLayer(nn.Module):
    """A layer of a captured model, on ``device``; it has :meth:`take` and its ``code`` to be given something to run."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.code = Code()
        self.device = device

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Holds ``tensors``, live and by their path in the captured module, and no others, from now on."""
        held = (self.named_parameters(remove_duplicate=False), self.named_buffers(remove_duplicate=False))
        for name, _ in [pair for pairs in held for pair in pairs]:
            delattr(self, name)
        for path, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(own_name(path), tensor)
            else:
                self.register_buffer(own_name(path), tensor)

    def held(self, path: str) -> Tensor | None:
        """The layer's tensor of the captured module's ``path``; None if there is none."""
        tensor: Tensor | None = getattr(self, own_name(path), None)
        return tensor

    def forward(self, values: tuple[Any, ...]) -> Any:
        variant, *given = values
        if not torch.compiler.is_dynamo_compiling():  # whoever runs compiled code has seen to it
            _here.device = self.device
        run, names = self.code.variants[variant]
        own = [getattr(self, name) if isinstance(name, str) else name.to(self.device) for name in names]
        return run(variant, self.device, *own, *given)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types here
        self.device = fn(torch.empty(0, device=self.device)).device
        return self


def own_name(path: str) -> str:
    """The name under which a layer holds what the captured module holds at ``path``: it allows no dots, and must not be
    that of an attribute of the layer's own."""
    return "/" + path.replace(".", "/")


def own_path(name: str) -> str:
    """The path of :func:`own_name` ``name``."""
    return name[1:].replace("/", ".")
