"""Metrics compute over all virtual workers, whoever holds them; where there are none, they are torchmetrics' own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric

from lightning_hetpipe.workers.collectives import is_shared, share

SYNC = Metric.sync
ASKED: list[str] = []


def with_another(tensor: Tensor, what: str) -> list[Tensor]:
    """As if another virtual worker held the same, and a one."""
    ASKED.append(what)
    return [tensor, tensor + 1]


@pytest.fixture
def shared() -> Iterator[None]:
    ASKED.clear()
    share(with_another)
    yield
    share(None)


def updated(metric: Any) -> Any:
    metric.update(torch.tensor([2.0, 4.0]))
    return metric


@pytest.mark.usefixtures("shared")
def test_metrics_made_before_and_after_clones_and_collections() -> None:
    metric = updated(CatMetric())
    assert metric.compute().tolist() == [2, 4, 3, 5]
    assert metric.value[0].tolist() == [2, 4], "it goes on with its own"
    assert metric.clone().compute().tolist() == [2, 4, 3, 5]
    assert set(ASKED) == {"state 1 of CatMetric"}
    collection = MetricCollection({"max": MaxMetric(), "min": MinMetric()})
    collection.update(torch.tensor([2.0, 4.0]))
    assert {name: value.item() for name, value in collection.compute().items()} == {"max": 5, "min": 2}


@pytest.mark.usefixtures("shared")
def test_what_a_metric_was_told_counts() -> None:
    told = updated(MeanMetric(distributed_available_fn=lambda: False))
    alone = updated(MeanMetric(sync_on_compute=False))
    assert [told.compute().item(), alone.compute().item()] == [3, 3]
    assert [is_shared(told), is_shared(MeanMetric())] == [False, True]
    assert ASKED == []


def test_nothing_remains() -> None:
    metric = updated(CatMetric())
    share(with_another)
    share(None)
    assert metric.compute().tolist() == [2, 4]
    assert Metric.sync is SYNC
    assert not is_shared(metric)
