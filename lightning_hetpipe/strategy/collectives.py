"""Lightning's collectives over the one primitive that virtual workers have, a gather."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.strategy.metric_replay import find_metrics

if TYPE_CHECKING:
    from lightning_hetpipe.strategy.group import Group


def broadcast(group: Group, value: Any, source: int) -> Any:
    """What virtual worker ``source`` gives; where that one does not take part, the first that does."""
    found = group.gather((group.index == source, isinstance(value, Path), _sent(value)))
    _, is_path, content = next((each for each in found if each[0]), found[0])
    return Path(content) if is_path else content


def reduce(group: Group, tensor: Tensor, how: Any) -> Tensor:
    """The sum, or by default the mean, of everyone's ``tensor``, added in the order of virtual workers."""
    name = str(getattr(how, "name", how) or "mean").lower().rpartition(".")[2]
    found = [each.to(tensor.device) for each in group.gather(tensor.detach().cpu())]
    stacked = torch.stack(found)
    if name in ("mean", "avg"):
        return _total(found).div(len(found)) if tensor.is_floating_point() else stacked.float().mean(0)
    reductions = {"sum": lambda: _total(found), "max": lambda: stacked.amax(0), "min": lambda: stacked.amin(0)}
    if name not in reductions:
        raise SettingError(f"reduce_op={how!r} is not known; use 'mean', 'sum', 'max' or 'min'")
    return reductions[name]()


def all_gather(group: Group, tensor: Tensor) -> Tensor:
    """Everyone's ``tensor``, stacked."""
    return torch.stack([each.to(tensor.device) for each in group.gather(tensor.detach().cpu())])


def decide(group: Group, decision: bool, unanimous: bool) -> bool:
    """Whether all (or any) of them say yes."""
    found = group.gather(bool(decision))
    return all(found) if unanimous else any(found)


def _total(found: list[Tensor]) -> Tensor:
    total = found[0].clone()
    for each in found[1:]:
        total += each
    return total


def _sent(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


@contextmanager
def shared_metrics(group: Group, module: nn.Module) -> Iterator[None]:
    """Within it, torchmetrics objects of ``module`` compute over all virtual workers.

    By themselves they look for a default process group only, and there is none.
    """

    def gather(tensor: Tensor, group_of_torch: Any = None, **_: Any) -> list[Tensor]:
        return [each.to(tensor.device) for each in group.gather(tensor.detach().cpu())]

    metrics: list[Any] = list(find_metrics(module))
    before = [(metric, metric.distributed_available_fn, metric.dist_sync_fn) for metric in metrics]
    for metric in metrics:
        metric.distributed_available_fn, metric.dist_sync_fn = _yes, gather
    try:
        yield
    finally:
        for metric, available, sync in before:
            metric.distributed_available_fn, metric.dist_sync_fn = available, sync


def _yes() -> bool:
    return True
