"""What passes between stages and user code: any nesting of tuples, lists and dicts, with tensors in it.

A value crosses a cut detached; whether a tensor in it required a gradient crosses with it, and on the other side it is
a fresh leaf. Gradients cross back as one optional tensor for each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.pipeline.lanes import move
from lightning_hetpipe.private import pytree, run_backward

Gradients = list[Tensor | None]
"""One entry for each tensor of a value, in order; None where no gradient reached it."""


@dataclass(slots=True)
class Value:
    """A detached value: its tensors, which of them require a gradient, and the structure around them.

    Nobody changes it; that it is not frozen is for speed.
    """

    tensors: tuple[Tensor, ...]
    requires_grad: tuple[bool, ...]
    others: tuple[Any, ...]
    spec: Any

    @staticmethod
    def of(tree: Any) -> Value:
        if isinstance(tree, Tensor):  # as most often; what follows would cost as much as a small layer
            return Value((tree.detach(),), (tree.requires_grad,), _ALONE, _LEAF)
        leaves, spec = pytree.tree_flatten(tree)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        return Value(
            tensors=tuple(tensor.detach() for tensor in tensors),
            requires_grad=tuple(tensor.requires_grad for tensor in tensors),
            others=tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves),
            spec=spec,
        )

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """The original nesting, around ``tensors``."""
        if self.others is _ALONE:
            return tensors[0]
        replaced = iter(tensors)
        return pytree.tree_unflatten([next(replaced) if o is _TENSOR else o for o in self.others], self.spec)

    def on(self, device: torch.device) -> Value:
        """The same on ``device``."""
        return Value(tuple(move(tensor, device) for tensor in self.tensors), self.requires_grad, self.others, self.spec)

    def leaves(self, device: torch.device) -> list[Tensor]:
        """Fresh leaves on ``device``, which require a gradient where the value did."""
        pairs = zip(self.tensors, self.requires_grad, strict=True)
        return [move(t.detach(), device).requires_grad_(wanted) for t, wanted in pairs]


_TENSOR = object()
"""Marks the place of a tensor among a value's leaves."""

_ALONE = (_TENSOR,)
_LEAF = pytree.tree_structure(0)
"""What a single tensor's leaves and its structure are."""


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a nested value, in the order in which :class:`Value` keeps them."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def equal(a: Tensor, b: Tensor) -> bool:
    """Equal, also where both are NaN."""
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()))


def all_equal(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether both tensors of each pair are :func:`equal`; all lie on one device, which is waited for once."""
    if pairs and _waits(pairs[0][0]) and all(one.shape == other.shape for one, other in pairs):
        differ = torch.stack([(one != other).any() for one, other in pairs]).any()
        if not differ:  # what differs may be NaN
            return True
    return all(equal(one, other) for one, other in pairs)


def _waits(tensor: Tensor) -> bool:
    """Whether who asks for its values waits for a device."""
    return tensor.device.type != "cpu"


def blocks(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, int], int]:
    """The blocks of memory that ``tensors`` lie in, with the bytes of each; sparse ones are left out."""
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided and tensor.numel()]
    storages = [(tensor.device, tensor.untyped_storage()) for tensor in strided]
    return {(device, storage.data_ptr()): storage.nbytes() for device, storage in storages}


def gradients(
    outputs: Sequence[Tensor], output_gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> Gradients:
    """Gradients of ``inputs``; None for those that need none or that no gradient reaches."""
    pairs = [(o, g) for o, g in zip(outputs, output_gradients, strict=True) if g is not None and o.requires_grad]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    found = iter(run_backward([o for o, _ in pairs], [g for _, g in pairs], wanted))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]
