"""torchmetrics that compute over all virtual workers.

By themselves metrics look for a default process group, and there is none. While virtual workers are together, a metric
that would look for one gathers through them instead, wherever it was made and whoever holds it: under ddp that is true
of metrics that hooks, callbacks and data modules make, too, and of those that a program makes between its runs. No
list of instances has them all, so ``Metric.sync`` is replaced for that time. With one virtual worker it never is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

Gather = Callable[[Tensor, str], list[Tensor]]
"""Gives everyone's tensor; the text names the call, for errors."""

_gather: Gather | None = None
_original = Metric.sync


def is_shared(metric: Metric) -> bool:
    """True if ``metric`` is synchronised when it computes."""
    return _gather is not None if _is_left_to_torch(metric) else bool(metric.distributed_available_fn())


def share(gather: Gather | None) -> None:
    """Have metrics gather by ``gather`` from now on; None leaves them to torch."""
    global _gather
    _gather = gather
    Metric.sync = _original if gather is None else _sync  # type: ignore[method-assign]


def _is_left_to_torch(metric: Metric) -> bool:
    """True if the metric was not given a way of its own to be distributed."""
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
