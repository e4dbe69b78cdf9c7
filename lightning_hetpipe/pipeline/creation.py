"""The dtype of tensors that layers create.

Torch's default dtype belongs to the whole process, and with ``precision="64-true"`` and the like it is another one
during ``training_step`` than around it. A stage runs meanwhile, so it cannot ask the process: what its layers create
without naming a dtype gets the one that holds in ``training_step``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ALWAYS = {
    torch.empty,
    torch.eye,
    torch.linspace,
    torch.logspace,
    torch.ones,
    torch.rand,
    torch.randn,
    torch.zeros,
    torch.hann_window,
    torch.hamming_window,
    torch.bartlett_window,
    torch.blackman_window,
    torch.kaiser_window,
}
_BY_VALUE = {torch.arange, torch.as_tensor, torch.full, torch.scalar_tensor, torch.tensor}


def creating(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Within it, this thread's new tensors have ``dtype``, if given, where they would have the default dtype."""
    return nullcontext() if dtype is None else _Creating(dtype)


class _Creating(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is None and (func in _ALWAYS or (func in _BY_VALUE and _has_float(args, kwargs))):
            kwargs["dtype"] = self._dtype
        return func(*args, **kwargs)


def _has_float(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    def look(value: Any) -> bool:
        return isinstance(value, float) or (isinstance(value, list | tuple) and any(look(part) for part in value))

    return any(look(value) for value in (*args, *kwargs.values()))
