"""A module's metrics, and calls of metrics and ``self.log`` that ``training_step`` makes ahead of its step."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.torch_private.modules import children
from lightning_hetpipe.torch_private.tensors import pytree

_NOT_THE_USER = (
    *("lightning_hetpipe.run.", "lightning_hetpipe.redirect", "lightning_hetpipe.pipeline."),
    *("lightning.", "torch.", "torchmetrics."),
)

READS = ("compute", "compute_all", "best_metric")
CHANGES = ("forward", "update", "reset", "merge_state", "increment", "reset_all")


def is_metric(value: object) -> bool:
    """Tell whether ``value`` has the interface of a metric (collections and trackers are no ``Metric``)."""
    return isinstance(value, (Metric, MetricCollection, MetricTracker))


def find_metrics(root: nn.Module) -> list[nn.Module]:
    """Every metric below ``root``: submodules, and what lists, tuples, sets and dicts among attributes hold."""
    found: dict[int, nn.Module] = {}

    def look(value: object, depth: int) -> None:
        if is_metric(value):
            assert isinstance(value, nn.Module)
            found.update((id(inner), inner) for inner in value.modules() if is_metric(inner))
        elif depth and isinstance(value, (list, tuple, set, frozenset, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                look(item, depth - 1)

    for module in root.modules():
        for value in list(vars(module).values()):  # its submodules are in one of them, a dict
            look(value, 4)
    return list(found.values())


def methods_of(metric: nn.Module) -> list[str]:
    """The methods of ``metric`` that read or change its state."""
    return [name for name in (*CHANGES, *READS) if hasattr(metric, name)]


def group(metrics: Iterable[nn.Module]) -> Iterator[dict[int, nn.Module]]:
    """Metrics by ``id``, those that share any submodule in one group: their copies must share its copy."""
    groups: list[tuple[set[int], dict[int, nn.Module]]] = []
    for metric in metrics:
        parts, members = {id(part) for part in metric.modules()}, {id(metric): metric}
        apart = []
        for other_parts, other_members in groups:
            if parts.isdisjoint(other_parts):
                apart.append((other_parts, other_members))
            else:
                parts, members = parts | other_parts, {**other_members, **members}
        groups = [*apart, (parts, members)]
    return (members for _, members in groups)


def child_ids(module: nn.Module) -> list[int]:
    """Changes when a child, or a member of a ModuleList or ModuleDict among them, was replaced: a cheap look per step.

    Ids suffice: the metrics known so far are kept alive, so a new one has another id.
    """
    ids: list[int] = []
    for child in children(module):
        ids.append(id(child))
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            ids.extend(map(id, children(child)))
    return ids


@dataclass(eq=False)
class LogCall:
    """``self.log`` or ``self.log_dict``, called ahead of its step. Tensors are detached and cloned."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str


@dataclass(eq=False)
class MetricCall:
    """A method called on a metric ahead of its step. ``args`` and ``kwargs`` are the caller's, detached and cloned.

    Attributes:
        where: The line of the user's code.
        draws: The generators' states before the call, if it drew random numbers.
        answer: The value that the caller was given, of a method that reads.
    """

    metric: nn.Module
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str
    draws: list[Tensor] | None = None
    answer: Any = field(default=None, repr=False)

    def replay(self, drawing: Callable[[list[Tensor] | None, Callable[[], Any]], Any]) -> None:
        """Calls the metric itself, within ``drawing``, which sets the generators to given states.

        Raises:
            SettingError: if a value that was read ahead of time turns out to be another one.
        """
        answer = drawing(self.draws, lambda: getattr(self.metric, self.method)(*self.args, **self.kwargs))
        if self.method in READS and not _same(answer, self.answer):
            raise SettingError(
                f"training_step read {type(self.metric).__name__}.{self.method}() ahead of time, but the metric was "
                "changed outside training_step before that step; log the metric object itself "
                "(self.log(name, metric)), or set in_flight=1"
            )


@dataclass(eq=False)
class Record:
    """The calls of one minibatch's ``training_step`` that wait for their step, in order."""

    calls: deque[LogCall | MetricCall] = field(default_factory=deque)

    @property
    def metric_calls(self) -> list[MetricCall]:
        """The calls of metrics."""
        return [call for call in self.calls if isinstance(call, MetricCall)]


def caller() -> str:
    """The line of the user's code that makes the call which is being recorded."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USER):
        frame = frame.f_back
    return f"recorded at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _same(one: Any, other: Any) -> bool:
    """Equality of two answers of a metric, up to the rounding in which repeated reductions on a GPU differ."""
    ones, one_spec = pytree.tree_flatten(one)
    others, other_spec = pytree.tree_flatten(other)
    return one_spec == other_spec and all(_same_leaf(a, b) for a, b in zip(ones, others, strict=True))


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one.to(other), other, equal_nan=True)
    return bool(one == other or (one != one and other != other))  # NaN is the same answer as NaN
