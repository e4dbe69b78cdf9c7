"""Caches that a forward extends for longer sequences, as rotary embeddings do: equal to a plain run, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.exact.running import assert_same_run, fit
from tests.oracle import Batch, Outputs
from tests.support.equality import assert_same
from tests.support.models import SGD, Learner
from tests.support.small import assert_refused, pipeline

LENGTHS = (4, 4, 6, 5, 8, 4)


def table(length: int, longest: float = 1.0) -> Tensor:
    return torch.cos(torch.arange(length)[:, None] * torch.arange(1, 9) * 0.1 / longest)


class Cache(nn.Module):
    """Multiplies by a table of at least so many rows."""

    length: int
    cos: Tensor

    def __init__(self, extend: Callable[[Any, int], None], starts: int = 0) -> None:
        super().__init__()
        self.length, self._extend = 0, extend
        if starts:
            extend(self, starts)

    def forward(self, x: Tensor) -> Tensor:
        self._extend(self, x.shape[1])
        return x * self.cos[: x.shape[1]]


def attribute(cache: Cache, length: int) -> None:
    if length > cache.length:
        cache.length, cache.cos = length, table(length)


def buffer(cache: Cache, length: int) -> None:
    if length > cache.length:
        cache.length = length
        cache.register_buffer("cos", table(length), persistent=False)


def of_this_length(cache: Cache, length: int) -> None:
    if length != cache.length:
        cache.length, cache.cos = length, table(length)


def of_the_longest(cache: Cache, length: int) -> None:
    if length > cache.length:
        cache.length, cache.cos = length, table(length, float(length))


class Rotary(nn.Module):
    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.first, self.cache, self.second = nn.Linear(1, 8), cache, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.cache(self.first(x)).tanh().mean(1))
        return y


class Lengths(Learner):
    net: Any

    def __init__(self, extend: Callable[[Any, int], None], starts: int = 0) -> None:
        super().__init__(SGD)
        self.net = Rotary(Cache(extend, starts))

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        return {"loss": F.cross_entropy(self.net(x), y)}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", self.compute(batch)["loss"])


def batches(lengths: tuple[int, ...] = LENGTHS) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    made: Any = [(torch.randn(4, length, 1, generator=generator), torch.arange(4) % 3) for length in lengths]
    return DataLoader(made, batch_size=None)


@pytest.mark.parametrize(("extend", "starts"), [(attribute, 0), (buffer, 0), (buffer, 4)])
def test_a_cache_that_grows(extend: Callable[[Any, int], None], starts: int) -> None:
    torch.manual_seed(5)
    task, validated = Lengths(extend, starts), batches((4, 10, 6))
    ours = copy.deepcopy(task)
    strategy = pipeline(3, weights="sync")
    runs = [fit(each, batches(), val_loader=validated, strategy=s) for each, s in ((task, "auto"), (ours, strategy))]
    assert_same_run(*runs)
    assert_same(task.trainer.callback_metrics, ours.trainer.callback_metrics)
    assert task.net.cache.length == ours.net.cache.length == 10
    assert torch.equal(task.net.cache.cos, ours.net.cache.cos)


@pytest.mark.parametrize("extend", [attribute, buffer])
def test_it_repeats_with_several_in_flight(extend: Callable[[Any, int], None]) -> None:
    torch.manual_seed(5)
    task, loader = Lengths(extend), batches((4, 4, 6, 5))
    assert_same_run(*[fit(copy.deepcopy(task), loader, strategy=pipeline(3), max_epochs=1) for _ in range(2)])


def test_a_cache_of_the_last_length_is_refused() -> None:
    message = "layer 'net' sets its attribute 'length' (of Cache) in forward"
    assert_refused(Lengths(of_this_length), message, "set in_flight=1", strategy=pipeline(3), loader=batches())


def test_a_cache_whose_first_rows_change_is_refused() -> None:
    message, loader = "'net' computes other values in minibatch 5 than its graph", batches((4, 4, 6, 8, 5))
    assert_refused(Lengths(of_the_longest), message, "set in_flight=1", strategy=pipeline(3), loader=loader)
