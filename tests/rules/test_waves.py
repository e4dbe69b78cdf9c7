"""Waves, clocks and how far apart they may be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetpipe.rules.waves import cut_after, may_commit, may_pull, slowest
from tests.oracle_policies import global_staleness


def test_who_waits_at_a_cut_holds_nobody_up() -> None:
    assert slowest([3, 5]) == 3
    assert slowest([None, 5]) == 5
    assert slowest([None, None]) is None
    assert slowest([]) is None


@pytest.mark.parametrize(
    ("c_local", "c_global", "distance", "may"),
    [(1, 0, 0, False), (1, 1, 0, True), (3, 1, 2, True), (4, 1, 2, False), (9, None, 0, True)],
)
def test_a_vw_goes_on_while_the_slowest_is_near_enough(
    c_local: int, c_global: int | None, distance: int, may: bool
) -> None:
    assert may_pull(c_local, c_global, distance) is may


def test_a_wave_is_committed_when_none_of_it_is_still_to_come() -> None:
    assert [may_commit(2, c_global) for c_global in (1, 2, 3, None)] == [False, False, True, True]


@pytest.mark.parametrize(("in_flight", "distance", "staleness"), [(1, 0, 0), (4, 0, 6), (4, 1, 10), (4, 4, 22)])
def test_global_staleness(in_flight: int, distance: int, staleness: int) -> None:
    s_local = in_flight - 1
    assert global_staleness(in_flight, distance) == staleness == (distance + 1) * (s_local + 1) + s_local - 1


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(0, 4), st.data())
def test_nobody_can_be_past_a_cut_without_knowing_of_it(clock: int, distance: int, data: st.DataObject) -> None:
    """VW 0 asks for it with its update of ``clock``; the pull before it cannot tell."""
    at = cut_after(clock, distance)
    assert not may_pull(at, clock, distance)  # at that clock a pull waits for VW 0's push
    assert may_pull(at - 1, clock, distance)  # and before, it need not
    assert may_pull(at, clock + 1, distance)
