"""Synchronisation of torchmetrics over all virtual workers.

By themselves metrics look for a default process group, but there is none. While virtual workers are together, such a
metric gathers through them instead, wherever it was made and whoever holds it. Under ddp, metrics of hooks, callbacks
and data modules are also synchronised, and so are metrics that a program makes between its runs. No list of instances
has them all, so ``Metric.sync`` is replaced for that time. With one virtual worker it is never replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

Gather = Callable[[Tensor, str], list[Tensor]]
"""Function that returns the tensors of all virtual workers. The text names the call, for errors."""

_gather: Gather | None = None
_original = Metric.sync


def is_shared(metric: Metric) -> bool:
    """Return True if ``metric`` is synchronised when it computes."""
    return _gather is not None if _is_left_to_torch(metric) else bool(metric.distributed_available_fn())


def share(gather: Gather | None) -> None:
    """Make metrics gather by ``gather`` from now on. None leaves them to torch."""
    global _gather
    _gather = gather
    Metric.sync = _original if gather is None else _sync  # type: ignore[method-assign]


def _is_left_to_torch(metric: Metric) -> bool:
    """Return True if the metric was given no test of its own for being distributed."""
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

        dist_sync_fn, distributed_available = all_of, lambda: True
    _original(self, dist_sync_fn, process_group, should_sync, distributed_available)
