"""What autocast does where user code calls a piece: it belongs to a thread, and stages run in others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Autocast:
    """The state of autocast in one place.

    Attributes:
        dtypes: For each type of device, the dtype where autocast is on; None where it is off.
        cache: Whether cast weights are kept within it.
    """

    dtypes: tuple[tuple[str, torch.dtype | None], ...]
    cache: bool

    @staticmethod
    def current() -> Autocast:
        """What holds in this thread."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        dtypes = [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds]
        return Autocast(tuple(zip(kinds, dtypes, strict=True)), torch.is_autocast_cache_enabled())

    @contextmanager
    def opened(self, *, alone: bool = True) -> Iterator[None]:
        """Lets it hold in this thread.

        Torch's cache of cast weights belongs to the process, and whoever leaves autocast clears it. So unless this
        thread is ``alone``, nothing is kept, not even by layers that open autocast themselves: gradients of a weight
        that is used again would depend on timing.
        """
        before = torch.is_autocast_cache_enabled()  # of this thread, and what autocast takes unless it is told
        if not alone:
            torch.set_autocast_cache_enabled(False)
        try:
            with ExitStack() as stack:
                for kind, dtype in self.dtypes:
                    if dtype is not None:
                        stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.cache and alone))
                yield
        finally:
            torch.set_autocast_cache_enabled(before)
