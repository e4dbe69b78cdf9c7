"""Autocast state at the call of a piece. It belongs to a thread, and stages have threads of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch


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
