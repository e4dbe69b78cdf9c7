"""Layouts of divided tensors: a view of the whole is a view of the parts, and units are divided by shares."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.pipeline.split.split_segment import joined, part
from lightning_hetpipe.rules.channel_layouts import ChannelLayout, apportioned
from tests.support.marks import explores


@explores(200)
@given(st.data())
def test_a_view_of_the_parts_is_a_part_of_the_view(data: st.DataObject) -> None:
    """Sizes are products of common factors, cut at random: any view of one by the other."""
    factors = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    before, after = (_grouped(factors, data) for _ in range(2))
    dim = data.draw(st.integers(0, len(before) - 1))
    outer = data.draw(st.sampled_from([each for each in range(1, before[dim] + 1) if before[dim] % each == 0]))
    rest = before[dim] // outer
    inner = data.draw(st.sampled_from([each for each in range(1, rest + 1) if rest % each == 0]))
    first = data.draw(st.integers(0, rest // inner))
    layout = ChannelLayout(dim, outer, inner, (first, rest // inner - first))
    whole = torch.arange(math.prod(factors)).reshape(before)
    parts = [part(whole, layout, member) for member in layout.members]
    assert torch.equal(joined(parts, layout), whole)
    if (found := layout.reshaped(before, after)) is not None:
        for member, each in zip(layout.members, parts, strict=True):
            assert torch.equal(part(whole.reshape(after), found, member).flatten(), each.flatten())


def _grouped(factors: list[int], data: st.DataObject) -> list[int]:
    places = data.draw(st.lists(st.integers(0, len(factors)), max_size=3))
    return [math.prod(factors[start:end]) for start, end in pairwise([0, *sorted(places), len(factors)])]


@pytest.mark.parametrize(
    ("layout", "before", "after", "found"),
    [
        (ChannelLayout(2, 1, 8, (3, 1)), ["b", "t", 32], ["b", "t", 4, 8], ChannelLayout(2, 1, 1, (3, 1))),
        (ChannelLayout(2, 3, 8, (3, 1)), ["b", "t", 96], ["b", "t", 3, 4, 8], ChannelLayout(3, 1, 1, (3, 1))),
        (ChannelLayout(1, 1, 1, (5, 2)), ["b", 7, 4, 4], ["b", 112], ChannelLayout(1, 1, 16, (5, 2))),
        (ChannelLayout(2, 1, 8, (3, 1)), ["t", "b", 32], ["t", "4*b", 8], ChannelLayout(1, None, 1, (3, 1))),
        (ChannelLayout(0, None, 1, (3, 1)), ["4*b", "t", 8], ["b", 4, "t", 8], ChannelLayout(1, 1, 1, (3, 1))),
        (ChannelLayout(2, 1, 1, (20, 12)), ["b", "t", 32], ["b", "t", 4, 8], None),
        (ChannelLayout(1, 1, 1, (5, 2)), ["b", 7, "h", "w"], ["b", "7*h*w"], None),
    ],
)
def test_views(layout: ChannelLayout, before: list[int | str], after: list[int | str], found: object) -> None:
    assert layout.reshaped(before, after) == found


@explores(100)
@given(st.integers(1, 100), st.lists(st.floats(0, 10), min_size=1, max_size=5).filter(lambda each: sum(each) > 0.01))
def test_units_are_divided_by_shares(units: int, shares: list[float]) -> None:
    counts = apportioned(units, shares)
    assert sum(counts) == units
    assert all(abs(count - units * share / sum(shares)) < 1 + 1e-9 for count, share in zip(counts, shares, strict=True))


def test_nothing_for_a_share_of_nothing() -> None:
    assert apportioned(7, [2.0, 0.0, 1.0]) == (5, 0, 2)
