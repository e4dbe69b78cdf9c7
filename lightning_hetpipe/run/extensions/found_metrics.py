"""The torchmetrics objects of a LightningModule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from lightning_hetpipe.torch_private.modules import children

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
