"""The dtypes in which layers compute: the state of autocast, and the dtype of tensors that they create.

Autocast belongs to a thread. Stages have threads of their own, which take its state at the call of a piece.

Torch's default dtype belongs to the whole process. With ``precision="64-true"`` and similar settings it differs during
``training_step``. A stage runs meanwhile, so it cannot ask the process. Its layers may create floating-point numbers,
or make them of whole ones (``torch.arange(n) / 3``), without naming a dtype. They get the default of ``training_step``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hetpipe.errors import PipelineRefusal, SettingError


@dataclass(frozen=True)
class Autocast:
    """The state of autocast in one place. ``dtypes`` has the dtype for each type of device, or None if autocast is off.
    ``cache`` tells whether cast weights are kept."""

    dtypes: tuple[tuple[str, torch.dtype | None], ...]
    cache: bool

    @staticmethod
    def current() -> Autocast:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        dtypes = [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds]
        return Autocast(tuple(zip(kinds, dtypes, strict=True)), torch.is_autocast_cache_enabled())

    def as_on_cpu(self, kind: str) -> Autocast:
        """Return the state for devices of another ``kind``: the CPU's state, unless autocast is on for them."""
        dtypes = dict(self.dtypes)
        return replace(self, dtypes=tuple({**dtypes, kind: dtypes.get(kind) or dtypes.get("cpu")}.items()))

    def opened(self, *, alone: bool = True) -> AbstractContextManager[None]:
        """Open this state in this thread, whatever its present state.

        Torch's cache of cast weights belongs to the process, and any thread that leaves autocast clears it. So unless
        this thread is ``alone``, nothing is kept, not even by layers that open autocast themselves. Otherwise gradients
        of a weight with several uses would depend on timing.
        """
        differs = [(kind, dtype) for kind, dtype in self.dtypes if dtype is not None or torch.is_autocast_enabled(kind)]
        return _Opened(differs, self.cache and alone, alone)


class _Opened:
    def __init__(self, dtypes: Sequence[tuple[str, torch.dtype | None]], cache: bool, alone: bool) -> None:
        self._alone = alone
        self._regions: list[AbstractContextManager[object]] = [
            torch.autocast(kind, dtype, enabled=dtype is not None, cache_enabled=cache) for kind, dtype in dtypes
        ]

    def __enter__(self) -> None:
        self._before = torch.is_autocast_cache_enabled()  # of this thread, and what autocast takes unless it is told
        if not self._alone:
            torch.set_autocast_cache_enabled(False)
        for region in self._regions:
            region.__enter__()

    def __exit__(self, *ended: Any) -> None:
        for region in reversed(self._regions):
            region.__exit__(*ended)
        torch.set_autocast_cache_enabled(self._before)


_ALWAYS = {torch.empty, torch.eye, torch.linspace, torch.logspace, torch.ones, torch.rand, torch.randn, torch.zeros}
_ALWAYS |= {torch.hann_window, torch.hamming_window, torch.bartlett_window, torch.blackman_window, torch.kaiser_window}
"""Functions whose results have the default dtype if no dtype is named."""

_BY_VALUE = {torch.arange, torch.as_tensor, torch.full, torch.scalar_tensor, torch.tensor}
"""Functions whose results have the default dtype if a given number is a float, and no dtype is named."""

_CONVERSIONS = {Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type}
_CONDITION: dict[Any, int] = {torch.where: 0, Tensor.where: 1}  # the place of the argument that stays a bool

_WHOLE: dict[Any, Any] = {torch.ops.aten.where.Scalar: torch.where}
"""Operators of graphs that take numbers only, with functions that take tensors as well."""


def creating(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Context manager in which this thread's new tensors have ``dtype``, if given, instead of the default dtype."""
    return _NOTHING if dtype is None else _Creating(dtype)


_NOTHING: AbstractContextManager[Any] = nullcontext()


class _Creating(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        has_float = func in _BY_VALUE and any(isinstance(value, float) for value in _flat((args, kwargs)))
        if kwargs.get("dtype") is None and (func in _ALWAYS or has_float):
            kwargs["dtype"] = self._dtype
        result = func(*args, **kwargs)
        if any(_is_floating(value) for value in _flat(result)) and _promotes(func, args, kwargs):
            return self._promoted(func, args, kwargs)
        return result

    def _promoted(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func`` on whole numbers that are converted to our default dtype first."""
        try:
            func = _WHOLE.get(func, func)
            if (condition := _CONDITION.get(func)) is not None:
                made = [a if i == condition else torch.as_tensor(a, dtype=self._dtype) for i, a in enumerate(args)]
            else:
                made = [a.to(self._dtype) if isinstance(a, Tensor) else a for a in args]
            result = func(*made, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            raise self._refusal(func) from error
        if isinstance(result, Tensor) and result.dtype == self._dtype:
            return result
        raise self._refusal(func)

    def _refusal(self, func: Callable[..., Any]) -> SettingError:
        return PipelineRefusal(
            f"a pipelined layer makes floating-point numbers of whole ones with {getattr(func, '__name__', func)}, for"
            " which torch takes the process's default dtype, and a stage has none of its own; convert its input first,"
            f" as with .to({self._dtype}), or train with precision='32-true'"
        )


def _promotes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a floating-point result is made of whole numbers only, and no dtype was named for it."""
    values = list(_flat((args, kwargs)))
    tensors = [value for value in values if isinstance(value, Tensor)]
    named = func in _CONVERSIONS or any(isinstance(value, torch.dtype) for value in values)
    return bool(tensors) and not named and not any(_is_floating(tensor) for tensor in tensors)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)
    elif isinstance(value, dict):
        yield from _flat(tuple(value.values()))
    else:
        yield value
