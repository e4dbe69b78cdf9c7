"""One layer of a captured model: a part of its graph, and the weights and buffers that this part reads.

Between two layers passes one tuple: the number of the graph's variant, then every value that a later layer needs.
Copies of a layer share its code, and have their own weights and buffers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, fx, nn

from lightning_hetpipe.accelerator import is_initialized
from lightning_hetpipe.torch_private.tensors import pytree

Run = Callable[..., Any]
"""Takes the variant's number, the device, the layer's tensors and earlier values. Returns the next values."""


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

    def run(self) -> Run:
        """Return a function that runs the graph."""
        run, outputs = functools.partial(self.module.forward, *self.regions), self.outputs

        def ran(variant: int, *values: Any) -> Any:
            found = run(*values)
            return (variant, *found) if outputs is None else pytree.tree_unflatten(list(found), outputs)

        return ran


class Code:
    """Code that a layer and its copies run.

    Attributes:
        variants: For each variant the graph, the names of the layer's tensors that it takes, and the function that runs
            it. A constant that only this variant has is there itself.
        changes: Names of the buffers that a variant changes in place.
        named: Owners of tensors that the captured module does not hold, for messages.
    """

    def __init__(self) -> None:
        self.variants: list[tuple[LayerGraph, Sequence[str | Tensor], Run]] = []
        self.changes: set[str] = set()
        self.named: dict[str, str] = {}

    def clear(self) -> None:
        self.variants.clear()
        self.changes.clear()

    @property
    def graphs(self) -> list[LayerGraph]:
        """The graph of each variant."""
        return [graph for graph, *_ in self.variants]

    def add(self, graph: LayerGraph, own: Sequence[str | Tensor], changes: Sequence[str]) -> None:
        """Add a variant. Paths are those in the captured module, and a tensor is a constant."""
        self.changes.update(own_name(path) for path in changes)
        names = [own_name(each) if isinstance(each, str) else each for each in own]
        self.variants.append((graph, names, graph.run()))

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
        if not torch.compiler.is_dynamo_compiling():  # the caller of compiled code sets the device
            _here.device = self.device
        _, names, run = self.code.variants[variant]
        own = [getattr(self, name) if isinstance(name, str) else name.to(self.device) for name in names]
        return run(variant, self.device, *own, *given)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types here
        self.device = fn(torch.empty(0, device=self.device)).device
        return self


class GraphLayers:
    """The ``layers`` of one segment, all of one captured module, as one function, which takes and returns what they do.

    It calls graphs with the layers' tensors. Calls of modules would take a third of the time of short operators.
    """

    def __init__(self, layers: Sequence[GraphLayer]) -> None:
        self._layers = layers
        self._steps: dict[int, tuple[Any, list[_Step]]] = {}  # by variant, with the code of the first layer

    def __call__(self, values: tuple[Any, ...]) -> Any:
        variant, *given = values
        code = self._layers[0].code.variants[variant]
        first, steps = self._steps.get(variant, (None, []))
        if first is not code:  # a module that has changed was captured again, with new code for all of its layers
            steps = [_Step.of(layer, variant) for layer in self._layers]
            self._steps[variant] = code, steps
        for run, device, own in steps:
            _here.device = device
            tensors = [name.to(device) if table is None else table[name] for table, name in own]
            given = run(device, *tensors, *given)
        outputs = self._layers[-1].code.variants[variant][0].outputs
        return (variant, *given) if outputs is None else pytree.tree_unflatten(list(given), outputs)


class _Step(NamedTuple):
    """Graph of one layer, its device, and where its tensors are: the tables that hold them, with their names. A
    constant, which only this variant has, is there itself. Somebody may change it in place."""

    run: Callable[..., Any]
    device: torch.device
    own: Sequence[tuple[Mapping[str, Any] | None, Any]]

    @classmethod
    def of(cls, layer: GraphLayer, variant: int) -> _Step:
        graph, names, _ = layer.code.variants[variant]
        tables = [vars(layer)[table] for table in ("_parameters", "_buffers")]
        own = [(next((table for table in tables if name in table), None), name) for name in names]
        return cls(functools.partial(graph.module.forward, *graph.regions), layer.device, own)


def own_name(path: str) -> str:
    """Return a layer's name for a tensor at ``path``, without dots and unlike the layer's attributes."""
    return "/" + path.replace(".", "/")


def own_path(name: str) -> str:
    """Return the path of :func:`own_name` ``name``."""
    return name[1:].replace("/", ".")
