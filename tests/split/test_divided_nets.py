"""Whole nets, divided by shares and by any counts, give in float64 what they give unsplit."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.split.dividing import Whole, assert_divided, divided
from tests.split.nets import NETS, pixels
from tests.support.marks import explores


@functools.cache
def whole(net: str) -> Whole:
    make, given_to, _ = NETS[net]
    torch.manual_seed(1)
    return Whole(make(), given_to())


@pytest.mark.parametrize("shares", [(3, 1), (1, 2, 4), (0, 1)])
@pytest.mark.parametrize("net", NETS)
def test_by_shares(net: str, shares: tuple[float, ...]) -> None:
    assert len(assert_divided(whole(net), shares=shares)) == NETS[net][2]


@functools.cache
def units_of(net: str) -> dict[str, tuple[int, ...]]:
    with divided(whole(net)) as both:
        return both.segment.divisible


@pytest.mark.parametrize("net", NETS)
@explores(10)
@given(st.data())
def test_by_any_counts(net: str, data: st.DataObject) -> None:
    """Some layers have nothing on some members."""
    units = units_of(net)
    layers = data.draw(st.lists(st.sampled_from([*units]), min_size=1, unique=True))
    counts = {}
    for layer in layers:
        number = data.draw(st.sampled_from(units[layer]))
        first, second = sorted(data.draw(st.lists(st.integers(0, number), min_size=2, max_size=2)))
        counts[layer] = (first, second - first, number - second)
    assert_divided(whole(net), shares=(1, 1, 1), counts=counts, home=data.draw(st.integers(0, 2)))


def test_units_are_what_attention_keeps_together() -> None:
    gpt, llama = units_of("gpt"), units_of("llama, fewer heads")
    assert gpt["net.blocks.0.qkv"] == gpt["net.blocks.1.qkv"] == (4, 24)
    assert [llama[f"net.{name}"][0] for name in ("q", "k", "v")] == [2, 2, 2]
    assert units_of("bert")["net.q"] == (4, 8)
    assert units_of("encoder")["net.self_attn.in_proj_weight"] == (4, 24)
    assert units_of("mobilenet")["net.depth"] == (12,)
    assert set(gpt["net.head"]) == {8, 13}, "which are both ends of it"


def test_rows_may_be_named_with_the_counts_of_their_input() -> None:
    """Plans name all layers of a run that a group divides with the counts of its first one."""
    both = {"net.gate": (4, 20), "net.up": (4, 20), "net.down": (4, 20)}
    assert assert_divided(whole("llama"), shares=(1, 1), counts=both) == ["linear silu linear mul linear"]
    columns = {**both, "net.down": (15, 1)}
    assert assert_divided(whole("llama"), shares=(1, 1), counts=columns) == ["linear silu linear mul", "linear add"]


def test_units_of_what_follows_in_another_stage() -> None:
    """A plan counts heads, and the stage may end before the attention."""
    alone = Whole(nn.Linear(8, 8), pixels(2, 5, 8))
    assert assert_divided(alone, shares=(1, 1), counts={"net": (1, 3)}) == ["linear"]
    with divided(alone, shares=(1, 1), counts={"net": (1, 3)}) as both:
        assert both.segment.divisible == {"net": (8, 4)}
