"""Collectives of Lightning and torchmetrics over the only primitive of virtual workers, a gather of values as bytes."""

from __future__ import annotations

import io
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.user.minibatch import current

if TYPE_CHECKING:
    from lightning_hetpipe.workers.group import Group

_LOG = "lightning.pytorch.trainer.connectors.logger_connector.result"
"""The module in which Lightning reduces the values of ``self.log``."""


def everyones(group: Group, tensor: Tensor, what: str) -> list[Tensor]:
    """Return the ``tensor`` of each virtual worker, without its graph, on this one's device. ``what`` names the
    call."""
    return [each.to(tensor.device) for each in group.gather(_detached(tensor), what)]


def broadcast(group: Group, value: Any, source: int) -> Any:
    """Return the value of virtual worker ``source``, or if it does not take part, of the first that does."""
    is_path = isinstance(value, Path)
    given = (group.index == source, is_path, str(value) if is_path else value)
    found = group.gather(given, f"strategy.broadcast(src={source})")
    _, is_path, content = next((each for each in found if each[0]), found[0])
    return Path(content) if is_path else content


def reduce(group: Group, tensor: Tensor, how: Any) -> Tensor:
    """Return the mean, or another reduction ``how``, of all ``tensor``, added in the order of virtual workers."""
    name = str(getattr(how, "name", how) or "mean").lower().rpartition(".")[2]
    reductions: dict[str, Callable[[list[Tensor]], Tensor]] = {
        "mean": lambda found: _total(found).div(len(found)).to(tensor.dtype),
        "avg": lambda found: _total(found).div(len(found)).to(tensor.dtype),
        "sum": _total,
        "max": lambda found: torch.stack(found).amax(0),
        "min": lambda found: torch.stack(found).amin(0),
        "product": lambda found: torch.stack(found).prod(0),
    }
    if name not in reductions:
        raise SettingError(f"reduce_op={how!r} is not known; use 'mean', 'sum', 'max', 'min' or 'product'")
    return reductions[name](everyones(group, tensor, f"strategy.reduce(reduce_op={name!r})"))


def all_gather(group: Group, tensor: Tensor, sync_grads: bool) -> Tensor:
    """Stack the ``tensor`` of all virtual workers. Raise SettingError if gradients would have to flow back."""
    if sync_grads and tensor.requires_grad and torch.is_grad_enabled():
        raise SettingError(
            "all_gather(sync_grads=True) joins the backward passes of concurrent workers in every step, which virtual"
            " workers do not run in step; leave out sync_grads, or use another strategy"
        )
    return torch.stack(everyones(group, tensor, "all_gather"))


def decide(group: Group, decision: bool, unanimous: bool) -> bool:
    """Return True if all (or without ``unanimous``, any) of the virtual workers decide so."""
    found = group.gather(bool(decision), "strategy.reduce_boolean_decision")
    return all(found) if unanimous else any(found)


def tensors_of_first(group: Group, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
    """Return virtual worker 0's ``tensors`` on the CPU, or this one's if virtual worker 0 does not take part."""
    mine = [_detached(tensor) for tensor in tensors]
    given: list[Tensor] | None = group.gather(mine if group.index == 0 else None, what)[0]
    return mine if given is None else given


def runs_ahead(in_flight: int) -> bool:
    """Return True if this thread runs a user's step ahead of Lightning's loop, given Nm. Other virtual workers are
    elsewhere then."""
    minibatch = current()
    return minibatch is not None and (in_flight > 1 or minibatch.evaluates)


def is_logging() -> bool:
    """Return True if ``self.log`` is the caller. Its values of a step that runs ahead wait for Lightning's step."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _LOG:
        frame = frame.f_back
    return frame is not None


def ahead(what: str) -> SettingError:
    """Make the error of a user's step that runs ahead and waits for the other virtual workers."""
    return SettingError(
        f"{what} waits for the other virtual workers in a step that runs ahead of Lightning's loop, where each of them"
        " is at another place; call it in a hook, such as on_train_batch_end, or set in_flight=1"
    )


def _total(found: list[Tensor]) -> Tensor:
    total = found[0].clone()
    for each in found[1:]:
        total += each
    return total


def _detached(tensor: Tensor) -> Tensor:
    """Copy ``tensor`` to the CPU without its graph, and if it is a view, without the rest of its storage."""
    tensor = tensor.detach().cpu()
    is_view = tensor.layout == torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.clone() if is_view else tensor


# Metrics of torchmetrics look for a default process group, but there is none. While virtual workers are together,
# metrics gather through them, wherever they were made and whoever holds them. Under ddp, metrics of hooks, callbacks
# and data modules are also synchronised, and so are metrics that a program makes between its runs. No list of instances
# has them all, so `Metric.sync` is replaced for that time. With one virtual worker it is never replaced.

MetricGather = Callable[[Tensor, str], list[Tensor]]
"""Function that returns the tensors of all virtual workers. The text names the call, for errors."""

_metric_gather: MetricGather | None = None
_metric_sync = Metric.sync


def is_shared(metric: Metric) -> bool:
    """Return True if ``metric`` is synchronised when it computes."""
    return _metric_gather is not None if _is_left_to_torch(metric) else bool(metric.distributed_available_fn())


def share(gather: MetricGather | None) -> None:
    """Make metrics gather by ``gather`` from now on. None leaves them to torch."""
    global _metric_gather
    _metric_gather = gather
    Metric.sync = _metric_sync if gather is None else _sync  # type: ignore[method-assign]


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
    gather = _metric_gather
    if gather is not None and dist_sync_fn is None and distributed_available is None and _is_left_to_torch(self):
        state = 0

        def all_of(tensor: Tensor, group: Any = None) -> list[Tensor]:
            nonlocal state
            state += 1
            return gather(tensor, f"state {state} of {type(self).__name__}")

        dist_sync_fn, distributed_available = all_of, lambda: True
    _metric_sync(self, dist_sync_fn, process_group, should_sync, distributed_available)


# Gathers of values, in what virtual workers exchange as bytes.

CHUNK = 16 << 20
"""Bytes of content in a chunk, fewer than the servers' limit."""


def gather_in_chunks(
    content: bytes | memoryview,
    gather: Callable[[bytes], dict[int, bytes]],
    take: Callable[[int, bytes], object],
    chunk: int = CHUNK,
) -> list[int]:
    """Pass the content of all virtual workers to ``take``, in parts. Return the virtual workers whose content is
    complete.

    Servers keep two gathers at a time, and no large ones. The first byte of each chunk says whether another chunk
    follows. All virtual workers take part until no chunk is due, even after their own last chunk. A virtual worker that
    is gone before its last chunk is left out. Bound: the chunks of one gather.

    Args:
        content: Content of this virtual worker.
        gather: Function that gathers one chunk, and returns the chunks of all. All virtual workers call it equally
            often.
        take: Function of a virtual worker and the next, non-empty part of its content.
        chunk: Bytes of content in a chunk.
    """
    whole, due, start = list[int](), set[int](), 0
    while not start or due:
        follows = start + chunk < len(content)
        parts = gather(bytes([follows]) + bytes(content[start : start + chunk]))
        due = due & parts.keys() if start else {*parts}
        for vw in sorted(due):
            if len(parts[vw]) > 1:
                take(vw, parts[vw][1:])
            if not parts[vw][0]:
                whole.append(vw)
                due.remove(vw)
        start += chunk
    return sorted(whole)


def gather_values(group: Group, value: Any, what: str) -> list[Any]:
    """Return the values of all virtual workers that take part, in their order, by one exchange of bytes.

    Args:
        value: Tensors, numbers, strings, None, and lists, tuples and dicts of them, of any size.
        what: Name of the call, which must be equal on all.

    Raises:
        RuntimeError: if other virtual workers have made another call.
        SettingError: if a value cannot be sent between processes.
    """
    buffer = io.BytesIO()
    torch.save((what, value), buffer)
    found: dict[int, bytearray] = defaultdict(bytearray)
    whole = group.exchange(buffer.getbuffer(), lambda vw, part: found[vw].extend(part))
    parts = {vw: _loaded(found[vw], vw) for vw in whole}
    if others := [vw for vw, (theirs, _) in parts.items() if theirs != what]:
        unequal = group.settings.shares != "equal"
        raise RuntimeError(
            f"virtual worker {group.index} called {what}, while virtual worker {others[0]} called"
            f" {parts[others[0]][0]}: such a call has to be made by all of them, in the same order; look for one"
            " that only some make, such as below `if trainer.is_global_zero:`"
            + (", or in a step of a validation or test, where shares give them other numbers of batches" * unequal)
        )
    return [theirs for _, theirs in parts.values()]


def _loaded(part: bytearray, vw: int) -> tuple[str, Any]:
    try:
        loaded: tuple[str, Any] = torch.load(io.BytesIO(part), weights_only=True)
    except pickle.UnpicklingError:
        raise SettingError(
            f"virtual worker {vw} gave the others a value that cannot be sent between processes, as only tensors,"
            " numbers, strings, None, and lists, tuples and dicts of them can; convert it to one of these"
        ) from None
    return loaded
