"""Lightning's collectives, over a gather in which not everybody takes part."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lightning_hetpipe.strategy import collectives
from lightning_hetpipe.strategy.group import Group


class Sees:
    """One of several virtual workers: a gather gives it ``told``, and keeps what it gives."""

    def __init__(self, index: int, told: list[Any]) -> None:
        self.index = index
        self.told = told
        self.given: list[Any] = []

    def gather(self, value: Any) -> list[Any]:
        self.given.append(value)
        return self.told or [value]


def broadcast(values: dict[int, Any], source: int) -> list[Any]:
    """What each of those who take part gets, where each gives its value."""
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
