"""Private names of torch for subclasses of Tensor that hold no memory. Stages at other hosts need all of them.

If torch does not have a name:

- ``_foreach_utils``: this module cannot be imported.
- ``_foreach_supported_types``, ``_make_wrapper_subclass``: a stage's weights cannot be put at another host.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import optimizer
from torch.utils import _foreach_utils

from lightning_hetpipe.torch_private.tensors import exchange_memory

T = TypeVar("T", bound=Tensor)

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
    with suppress(RuntimeError):  # of a storage without memory, as of `without_memory`
        return tensor.untyped_storage().data_ptr() or None
    return None


def exchange(one: Tensor, other: Tensor) -> None:
    """Exchange ``one`` and ``other`` for everything that refers to them. Hooks stay with the objects.

    ``torch.utils.swap_tensors`` refuses tensors with weak references or with a live graph. Here such a graph keeps
    meaning the tensor from which it was made.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    exchange_memory(one, other)
