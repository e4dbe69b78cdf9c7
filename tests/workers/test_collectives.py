"""Lightning's collectives, over a gather that a test makes up: also one in which not everybody takes part."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.workers import collectives
from lightning_hetpipe.workers.group import Group


class Sees:
    """One of several virtual workers: a gather gives it ``told``, and keeps what it gives."""

    def __init__(self, index: int, told: list[Any]) -> None:
        self.index = index
        self.told = told
        self.given: list[Any] = []

    def gather(self, value: Any, what: str) -> list[Any]:
        self.given.append(value)
        return self.told or [value]


def broadcast(values: dict[int, Any], source: int) -> list[Any]:
    """Result of each of those who take part, where each gives its value."""
    all_see = [Sees(index, []) for index in sorted(values)]
    for each in all_see:
        collectives.broadcast(cast(Group, each), values[each.index], source)
    buffer = io.BytesIO()
    torch.save([each.given[0] for each in all_see], buffer)  # as they travel
    buffer.seek(0)
    told = torch.load(buffer, weights_only=True)
    return [collectives.broadcast(cast(Group, Sees(index, told)), values[index], source) for index in sorted(values)]


@pytest.mark.parametrize("value", [True, None, 2.5, "text", Path("a/b"), {"lr": [0.1, 0.2]}])
def test_all_get_what_the_source_gives(value: Any) -> None:
    assert broadcast({0: value, 1: 7, 2: 8}, 0) == [value] * 3


def test_where_the_source_waits_elsewhere_all_get_the_same() -> None:
    """Each had what itself had said; some saved a checkpoint for which the others never came."""
    assert broadcast({1: True, 2: False}, 0) == [True, True]


class Pair:
    """One of two; the other one gives twice as much."""

    def __init__(self, index: int = 0) -> None:
        self.index = index

    def gather(self, value: Any, what: str) -> list[Any]:
        other = 2 * value if isinstance(value, Tensor) else None
        return [value, other]


def group(index: int = 0) -> Group:
    return cast(Group, Pair(index))


@pytest.mark.parametrize(
    ("how", "expected"), [("mean", 4.5), (None, 4.5), ("sum", 9.0), ("max", 6.0), ("min", 3.0), ("product", 18.0)]
)
def test_reductions(how: str | None, expected: float) -> None:
    assert collectives.reduce(group(), torch.tensor(3.0), how).item() == expected


def test_a_mean_of_whole_numbers_is_one_as_in_ddp() -> None:
    assert collectives.reduce(group(), torch.tensor([3, 4]), "mean").tolist() == [4, 6]


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(SettingError, match="reduce_op='median' is not known"):
        collectives.reduce(group(), torch.tensor(3.0), "median")


def test_gradients_do_not_come_back() -> None:
    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(SettingError, match="leave out sync_grads"):
        collectives.all_gather(group(), weight, sync_grads=True)
    with torch.no_grad():
        assert collectives.all_gather(group(), weight, sync_grads=True).shape == (2, 2)
    assert not collectives.all_gather(group(), weight, sync_grads=False).requires_grad


def test_the_first_ones_tensors_come_as_they_are() -> None:
    pair = Pair()
    tensors = [torch.randn(3, 7), torch.tensor(5), torch.zeros(0), torch.randn(2).double(), torch.randn(8, 2).T]
    found = collectives.tensors_of_first(cast(Group, pair), tensors, "test")
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))
    assert [one.dtype for one in found] == [one.dtype for one in tensors]


def test_of_a_view_only_what_it_shows_is_sent() -> None:
    """All of a large tensor went over the network for the sake of its first row."""
    sees = Sees(0, [])
    collectives.all_gather(cast(Group, sees), torch.zeros(1000, 4)[0], sync_grads=False)
    assert sees.given[0].untyped_storage().nbytes() == 16
