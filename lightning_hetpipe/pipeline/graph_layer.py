"""One layer of a captured model: a part of its graph, and the weights and buffers that this part reads.

Between two layers passes one tuple: the number of the graph's variant, then every value that a later layer needs.
Copies of a layer share its code, and have their own weights and buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from lightning_hetpipe.accelerator import is_initialized
from lightning_hetpipe.torch_private.tensors import pytree


class _ThreadDevice(threading.local):
    device: torch.device | None = None


_here = _ThreadDevice()


def here() -> torch.device:
    """Return the device of the layer that runs in this thread, for regions of its graph, which are not given it."""
    if _here.device is not None:
        return _here.device
    # One of autograd's threads, one for each GPU, computes a region again, on the device of the thread.
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not is_initialized():
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def set_here(device: torch.device) -> None:
    """Set ``device`` as the device of layers in this thread."""
    _here.device = device


@dataclass(frozen=True)
class LayerGraph:
    """Graph of the computation of one layer.

    Attributes:
        module: Takes the ``regions``, the device, the layer's own tensors and the values from before.
        regions: Parts of the graph that operators take, such as code under ``torch.no_grad()``.
        outputs: Nesting of the last layer's outputs, or None if the next layer takes them flat.
    """

    module: fx.GraphModule
    regions: Sequence[fx.GraphModule]
    outputs: Any = None

    @property
    def text(self) -> str:
        """Graph as code."""
        return "\n".join(each.code for each in (self.module, *self.regions))

    def run(self, variant: int, *given: Any) -> Any:
        """Run the graph of ``variant`` on the device, the layer's tensors and earlier values. Return the next ones."""
        found = self.module.forward(*self.regions, *given)
        return (variant, *found) if self.outputs is None else pytree.tree_unflatten(list(found), self.outputs)


class Code:
    """Code that a layer and its copies run.

    Attributes:
        variants: For each variant the graph, and the names of the layer's tensors that it takes. A constant that only
            this variant has is there itself.
        changes: Names of the buffers that a variant changes in place.
        named: Owners of tensors that the captured module does not hold, for messages.
    """

    def __init__(self) -> None:
        self.variants: list[tuple[LayerGraph, Sequence[str | Tensor]]] = []
        self.changes: set[str] = set()
        self.named: dict[str, str] = {}

    def clear(self) -> None:
        self.variants.clear()
        self.changes.clear()

    @property
    def graphs(self) -> list[LayerGraph]:
        """The graph of each variant."""
        return [graph for graph, _ in self.variants]

    def add(self, graph: LayerGraph, own: Sequence[str | Tensor], changes: Sequence[str]) -> None:
        """Add a variant. Paths are those in the captured module, and a tensor is a constant."""
        self.changes.update(own_name(path) for path in changes)
        names = [own_name(each) if isinstance(each, str) else each for each in own]
        self.variants.append((graph, names))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class GraphLayer(nn.Module):
    """A layer of a captured model on ``device``. :meth:`take` and ``code`` give it tensors and code."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.code = Code()
        self.device = device

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold ``tensors``, live and by path in the captured module, in place of all earlier tensors."""
        held = (self.named_parameters(remove_duplicate=False), self.named_buffers(remove_duplicate=False))
        for name, _ in [pair for pairs in held for pair in pairs]:
            delattr(self, name)
        for path, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(own_name(path), tensor)
            else:
                self.register_buffer(own_name(path), tensor)

    def held(self, path: str) -> Tensor | None:
        """Return the layer's tensor of the captured module's ``path``, or None."""
        tensor: Tensor | None = getattr(self, own_name(path), None)
        return tensor

    def forward(self, values: tuple[Any, ...]) -> Any:
        variant, *given = values
        graph, names = self.code.variants[variant]
        if torch.compiler.is_dynamo_compiling():  # the caller of compiled code sets the device
            own = [getattr(self, name) if isinstance(name, str) else name.to(self.device) for name in names]
        else:  # without calls of torch's, which take as long as a short operator
            _here.device = self.device
            held = vars(self)["_parameters"] | vars(self)["_buffers"]
            own = [held[name] if isinstance(name, str) else name.to(self.device) for name in names]
        return graph.run(variant, self.device, *own, *given)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types here
        self.device = fn(torch.empty(0, device=self.device)).device
        return self


def own_name(path: str) -> str:
    """Return a layer's name for a tensor at ``path``, without dots and unlike the layer's attributes."""
    return "/" + path.replace(".", "/")


def own_path(name: str) -> str:
    """Return the path of :func:`own_name` ``name``."""
    return name[1:].replace("/", ".")
