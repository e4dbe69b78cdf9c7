"""torchmetrics compute over all virtual workers.

By themselves they look for a default process group, and there is none. So while virtual workers are together, a metric
that would look for one, wherever it was made and whoever holds it, asks them instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

Gather = Callable[[Tensor, str], list[Tensor]]
"""Gives everyone's tensor; the text names what gathers."""

_gather: Gather | None = None
_original = Metric.sync


def is_shared(metric: Metric) -> bool:
    """Whether ``metric`` is synchronised where it computes."""
    return _gather is not None if _is_left_to_torch(metric) else bool(metric.distributed_available_fn())


def share(gather: Gather | None) -> None:
    """From now on metrics gather by ``gather``; None leaves them to torch."""
    global _gather
    _gather = gather
    Metric.sync = _original if gather is None else _sync  # type: ignore[method-assign]


def _is_left_to_torch(metric: Metric) -> bool:
    """Whether nobody has told the metric otherwise how it is distributed."""
    return metric.distributed_available_fn in (None, jit_distributed_available)


def _sync(
    self: Metric,
    dist_sync_fn: Callable[..., Any] | None = None,
    process_group: Any = None,
    should_sync: bool = True,
    distributed_available: Callable[[], bool] | None = None,
) -> None:
    gather = _gather
    if gather is not None and dist_sync_fn is None and distributed_available is None and _is_left_to_torch(self):
        state = 0

        def all_of(tensor: Tensor, group: Any = None) -> list[Tensor]:
            nonlocal state
            state += 1
            return gather(tensor, f"state {state} of {type(self).__name__}")

        dist_sync_fn, distributed_available = all_of, _yes
    _original(self, dist_sync_fn, process_group, should_sync, distributed_available)


def _yes() -> bool:
    return True
