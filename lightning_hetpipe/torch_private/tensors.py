"""Private names of torch for tensors: their memory, changes, nestings and gradients, and subclasses without memory.

``pytree`` is what torch's own extensions build on, but carries an underscore in its path. ``foreach_copy_`` copies a
stage's weights in one fused call. ``Tensor._version`` counts in-place changes. Stages at other hosts need subclasses of
Tensor that hold no memory.

If torch does not have a name:

- ``_pytree``, ``_execution_engine``, ``_foreach_utils``: this module cannot be imported.
- ``_version``, ``_foreach_copy_``: training fails when it first looks for changes of weights, or copies them.
- ``_backward_hooks``: training fails when it first looks for hooks of parameters.
- ``_post_accumulate_grad_hooks``: hooks of this kind do not run, and no error says so.
- ``_unsafe_preserve_version_counter``, ``_base``: training fails if user code changes tensors in place that
  pipelined modules use, too.
- ``_C``, ``_functorch``: training fails at the first tensor that user code computes with.
- ``_swap_tensor_impl``: a model that is made on meta cannot be given memory, and a stage's weights cannot be put at
  another host.
- ``_foreach_supported_types``, ``_make_wrapper_subclass``: a stage's weights cannot be put at another host.
- ``_construct_storage_from_data_pointer``: modules with inputs or weights on several devices cannot be captured.
- ``_indices``, ``_values``: sparse gradients fail on accelerators and at other hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn.parameter import is_lazy
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree

__all__ = ["pytree"]

T = TypeVar("T", bound=Tensor)


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, fused if the devices allow it."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


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


# Subclasses without memory.

as_plain: Callable[[], AbstractContextManager[None]] = torch.DisableTorchFunctionSubclass
"""Context in which functions of subclasses run like functions of a plain tensor, down to their operators."""


def make_without_memory(cls: type[T], like: Tensor, device: torch.device) -> T:
    """Make a tensor of class ``cls`` with sizes, strides and dtype of ``like``, and no memory.

    Each operator on it is a call of ``cls.__torch_dispatch__``.
    """
    make: Any = torch.Tensor._make_wrapper_subclass
    made: T = make(cls, like.size(), strides=like.stride(), dtype=like.dtype, layout=like.layout, device=device)
    return made


def take_in_foreach(cls: type[Tensor]) -> None:
    """Make optimizers and gradient clipping use ``foreach`` for tensors of class ``cls`` like for plain tensors."""
    for known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if cls not in known:
            known.append(cls)


def address_of(tensor: Tensor) -> int | None:
    """Return the address of the memory of ``tensor``, or None if it has no memory in this process."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except RuntimeError:  # of a storage without memory, as of `without_memory`
        return None


def exchange(one: Tensor, other: Tensor) -> None:
    """Exchange ``one`` and ``other`` for everything that refers to them. Hooks stay with the objects.

    ``torch.utils.swap_tensors`` refuses tensors with weak references or with a live graph. Here such a graph keeps
    meaning the tensor from which it was made.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    exchange_memory(one, other)


# Backward passes, and the graphs that they follow.

_engine: Any = torch.autograd.Variable._execution_engine


def run_backward(
    outputs: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor | GradientEdge],
    keep_graph: bool = False,
) -> Sequence[Tensor | None]:
    """Compute gradients as ``torch.autograd.grad`` does, without its slow checks. Unreached inputs get None."""
    found: Sequence[Tensor | None] = _engine.run_backward(
        tuple(outputs),
        tuple(gradients),
        keep_graph,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def graph_nodes(starts: Iterable[Node | None], barred: Iterable[Node | None]) -> Iterator[Node]:
    """Yield the nodes of autograd's graph from ``starts`` (included) on, on ways that pass no ``barred`` node."""
    seen: set[Node | None] = {None, *barred}
    pending = list(starts)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        yield node
        seen.add(node)
        pending.extend(following for following, _ in node.next_functions)


def following_nodes(tensors: Iterable[Tensor]) -> list[Node | None]:
    """Return the nodes next to the nodes of ``tensors``, on the way to leaves."""
    return [following for tensor in tensors if tensor.grad_fn for following, _ in tensor.grad_fn.next_functions]


def graph_start(tensor: Tensor) -> Node | Tensor | None:
    """Return the start of autograd's graph of ``tensor``: its node, the tensor itself if it is a leaf, or None."""
    return tensor.grad_fn if tensor.grad_fn is not None else tensor if tensor.requires_grad else None


def graph_leaves(starts: Iterable[Node | Tensor | None], barred: Iterable[Node | None] = ()) -> Iterator[Tensor]:
    """Yield the leaves to which ``starts`` lead on ways that pass no ``barred`` node (``AccumulateGrad.variable``)."""
    starts = [*starts]
    yield from (start for start in starts if isinstance(start, Tensor))
    for node in graph_nodes((start for start in starts if not isinstance(start, Tensor)), barred):
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
