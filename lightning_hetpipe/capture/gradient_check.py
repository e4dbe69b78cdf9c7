"""Compares the gradients of a graph with those of the module itself, for the same gradients of the outputs.

The values that a graph gives do not show what acts in the backward pass alone. The module's gradients come from the
autograd graph of its watched call, which its loss keeps, so that the module is not run once more. Those of the graph
are computed layer by layer, from the last one to the first, so that one layer's activations are held at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from lightning_hetpipe.capture.call_tree import WatchedCall
from lightning_hetpipe.capture.captured import graph_layer
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.graph_layer import GraphLayer, own_path
from lightning_hetpipe.pipeline.values import Value, tensors_of
from lightning_hetpipe.torch_private.autograd import graph_leaves, graph_start
from lightning_hetpipe.torch_private.tensors import without_gradient_hooks


@dataclass(frozen=True)
class Tolerance:
    """By how much two gradients may differ.

    Attributes:
        part: Of a gradient, as its sums associate otherwise.
        negligible: Of the piece's largest gradient, which is taken for rounding errors.
    """

    part: float
    negligible: float


EXACT, ROUGH = Tolerance(1e-3, 1e-5), Tolerance(0.1, 1e-2)
"""For gradients computed in 32 bits or more, and for gradients computed in fewer bits, as under autocast."""


def refuse_other_gradients(
    piece: Piece, call: WatchedCall, inputs: Sequence[Value], copied: Callable[[GraphLayer], GraphLayer]
) -> None:
    """Compare the graph of ``piece``, which gave the values of ``call``, with the module.

    Args:
        piece: Captured.
        call: Its watched call, before the backward of the loss.
        inputs: The input of each layer in it.
        copied: Makes a copy of a layer, with the buffers from before the call.

    Raises:
        PipelineRefusal: which names the first input or weight with another gradient.
    """
    outputs = [tensor for tensor in call.outputs if tensor.requires_grad]
    if not outputs:
        return
    starts = [graph_start(tensor) for tensor in call.inputs if tensor.requires_grad]
    earlier = {id(leaf) for leaf in graph_leaves(starts)}  # whose gradients come from earlier calls, too
    names = {f"input {n}": tensor for n, tensor in enumerate(call.inputs) if tensor.requires_grad}
    names |= {f"'{name}'": each for name, each in piece.module.named_parameters() if id(each) not in earlier}
    wanted = {name: tensor for name, tensor in names.items() if tensor.requires_grad}
    if not wanted:
        return
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(each.shape, generator=generator).to(each.device, each.dtype) for each in outputs]
    with without_gradient_hooks([*outputs, *wanted.values()]):
        of_module = torch.autograd.grad(outputs, [*wanted.values()], given, retain_graph=True, allow_unused=True)
    of_graph = _of_graph(piece, call, inputs, given, copied)
    found = [of_graph.get(id(tensor)) for tensor in wanted.values()]
    largest = max((_norm(gradient) for gradient in of_module if gradient is not None), default=0.0)
    for name, one, other in zip(wanted, of_module, found, strict=True):
        if not alike(one, other, tolerance_of(call.autocast, one), largest):
            raise PipelineRefusal(
                f"the graph that torch.export makes of '{piece.name}' gives other gradients than the module itself, of"
                f" {name} first, so that the module does something in its backward that the graph does not see; do"
                " that in training_step"
            )


def _of_graph(
    piece: Piece,
    call: WatchedCall,
    inputs: Sequence[Value],
    given: Sequence[Tensor],
    copied: Callable[[GraphLayer], GraphLayer],
) -> dict[int, Tensor]:
    """The graph's gradients, by the ``id`` of the module's own inputs and weights."""
    live = dict(piece.module.named_parameters(remove_duplicate=False))
    found: dict[int, Tensor] = {}
    wants = [tensor.requires_grad for tensor in call.outputs]
    left = iter(given)
    after: list[Tensor | None] = [next(left) if wanted else None for wanted in wants]
    for layer, value in zip(reversed(piece.layers), reversed(inputs), strict=True):
        copy, leaves = copied(graph_layer(layer)), value.leaves()
        with torch.enable_grad():
            made = tensors_of(copy(value.tree(leaves)))
        pairs = [(one, each) for one, each in zip(made, after, strict=True) if each is not None and one.requires_grad]
        weights = [(live.get(own_path(name)), each) for name, each in copy.named_parameters()]
        trained = [(own, each) for own, each in weights if own is not None and each.requires_grad]
        targets = [*compress(leaves, value.requires_grad), *(each for _, each in trained)]
        gradients: Sequence[Tensor | None] = [None] * len(targets)
        if pairs and targets:
            ones, others = zip(*pairs, strict=True)
            gradients = torch.autograd.grad(ones, targets, others, allow_unused=True)
        rest = iter(gradients)
        after = [next(rest) if wanted else None for wanted in value.requires_grad]
        for (own, _), gradient in zip(trained, rest, strict=True):
            if gradient is not None:
                before = found.get(id(own))
                found[id(own)] = gradient if before is None else before + gradient.to(before.device)
    # The first layer is given the number of a variant, then each distinct tensor of the call once, in order.
    for tensor, gradient in zip(call.inputs, after, strict=True):
        if gradient is not None:
            found[id(tensor)] = gradient
    return found


def tolerance_of(autocast: Autocast, tensor: Tensor | None) -> Tolerance:
    """By how much ``tensor`` may differ, if it was computed under ``autocast``."""
    low = any(dtype is not None for _, dtype in autocast.dtypes)
    return ROUGH if low or (tensor is not None and tensor.element_size() < 4) else EXACT


def alike(one: Tensor | None, other: Tensor | None, tolerance: Tolerance, largest: float = 0.0) -> bool:
    """Tell whether two tensors of one shape are the same up to rounding, beside a tensor of norm ``largest``."""
    if one is None or other is None:
        return one is other
    size, difference = _norm(one), _norm(one - other.to(one.device))
    if difference != difference:  # both may have infinite entries, from the made-up gradients of outputs
        return not bool(torch.isfinite(one).all()) and not bool(torch.isfinite(other).all())
    return difference <= max(tolerance.part * size, tolerance.negligible * largest)


def _norm(tensor: Tensor) -> float:
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return float(torch.linalg.vector_norm(dense.to(torch.promote_types(dense.dtype, torch.float32))))
