"""Private names of torch for tensors: their memory, their changes, and nestings of them.

``pytree`` is what torch's own extensions build on, but carries an underscore in its path. ``foreach_copy_`` copies a
stage's weights in one fused call. ``Tensor._version`` counts in-place changes.

If torch does not have a name:

- ``_pytree``: this module cannot be imported.
- ``_version``, ``_foreach_copy_``: training fails when it first looks for changes of weights, or copies them.
- ``_backward_hooks``: training fails when it first looks for hooks of parameters.
- ``_post_accumulate_grad_hooks``: hooks of this kind do not run, and no error says so.
- ``_unsafe_preserve_version_counter``, ``_base``: training fails if user code changes tensors in place that
  pipelined modules use, too.
- ``_C``, ``_functorch``: training fails at the first tensor that user code computes with.
- ``_swap_tensor_impl``: a model that is made on meta cannot be given memory, and a stage's weights cannot be put at
  another host.
- ``_construct_storage_from_data_pointer``: modules with inputs or weights on several devices cannot be captured.
- ``_foreach_norm``: gradient clipping over several devices fails.
- ``_indices``, ``_values``: sparse gradients fail on accelerators and at other hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

__all__ = ["pytree"]


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, fused if the devices allow it."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def foreach_norm(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Compute the 2-norm of each of ``tensors`` on one device, as gradient clipping does."""
    norms: tuple[Tensor, ...] = torch._foreach_norm(list(tensors), 2.0)
    return norms


def strided_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold the values of ``tensor``: the tensor itself, or the parts of a sparse tensor."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def unseen_change(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context in which in-place changes of ``tensor`` are not counted."""
    kept: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter  # torch has no types here
    manager: AbstractContextManager[None] = kept(tensor)
    return manager


def viewed(tensor: Tensor) -> Tensor:
    """Return the tensor of which ``tensor`` is a view for autograd, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def version_counter(tensor: Tensor) -> int:
    """Count the in-place changes of ``tensor``, except through ``tensor.data`` and in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return True if a user has put gradient hooks on ``tensor``."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


@contextmanager
def without_gradient_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Context manager in which a backward through ``tensors`` runs no user's hooks on them and retains no gradients."""
    hooked = [(hooks, dict(hooks)) for tensor in tensors if (hooks := tensor._backward_hooks)]
    retained = [(tensor, tensor.grad) for tensor in tensors if tensor.retains_grad]
    for hooks, _ in hooked:
        hooks.clear()  # autograd holds this very dict
    try:
        yield
    finally:
        for hooks, earlier in hooked:
            hooks.update(earlier)
        for tensor, gradient in retained:
            tensor.grad = gradient


def give_memory(tensor: Tensor, device: str = "cpu", memory: Tensor | None = None) -> Tensor:
    """Give ``tensor`` new memory on ``device``, or the memory of ``memory``. Return a tensor with its earlier memory.

    ``tensor`` stays the same object for whatever refers to it.
    """
    kind: Any = type(tensor)
    if is_lazy(tensor):
        made = kind(device=device, dtype=tensor.dtype)
    else:
        made = torch.empty_like(tensor, device=device, requires_grad=False) if memory is None else memory.detach()
        made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    exchange_memory(tensor, made)
    return made  # type: ignore[no-any-return]


def exchange_memory(one: Tensor, other: Tensor) -> None:
    """Exchange memory and autograd's state of two tensors. Hooks stay with the objects."""
    pair: list[Any] = [one, other]  # torch has no types here
    hooks = [(each._backward_hooks, getattr(each, "_post_accumulate_grad_hooks", None)) for each in pair]
    torch._C._swap_tensor_impl(one, other)
    for each, (before, after) in zip(pair, hooks, strict=True):
        each._backward_hooks, each._post_accumulate_grad_hooks = before, after


def without_memory(like: Tensor, device: torch.device) -> Tensor:
    """Make a tensor that looks like ``like`` on ``device``, without any memory. Its values must not be read."""
    bytes_of = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta").untyped_storage().nbytes
    storage = torch._C._construct_storage_from_data_pointer(0, device, bytes_of())
    bare: Any = torch.empty(0, dtype=like.dtype, device=device)  # torch has no types here
    found: Tensor = bare.set_(storage, 0, like.shape, like.stride())
    return found


def behind_functorch(tensor: Tensor) -> Tensor | None:
    """Return the tensor that ``torch.func`` has wrapped as ``tensor``, through all levels, or None."""
    functorch, inner = torch._C._functorch, tensor
    while functorch.is_functorch_wrapped_tensor(inner):
        inner = functorch.get_unwrapped(inner)
    return None if inner is tensor else inner
