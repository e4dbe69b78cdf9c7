"""Layers that a group of devices divides: the counts, next to all that there are, and the times."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.planning.model import divided_stage as module
from lightning_hetpipe.planning.model.cluster import Cluster, Device, Link, Node
from lightning_hetpipe.planning.model.divided_stage import balanced, group_times
from lightning_hetpipe.planning.model.profile import LayerBytes, LayerWidths, Profile, Times, Width


def every(units: int, members: int) -> Iterator[tuple[int, ...]]:
    """All ways to add up to ``units``."""
    if members == 1:
        yield (units,)
        return
    for count in range(units + 1):
        for others in every(units - count, members - 1):
            yield (count, *others)


@st.composite
def seconds(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    units, members = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    steps = [draw(st.lists(st.integers(0, 5), min_size=units, max_size=units)) for _ in range(members)]
    return [[0, *accumulate(own)] for own in steps], units


@given(seconds())
def test_no_counts_are_better(drawn: tuple[list[list[int]], int]) -> None:
    own, units = drawn

    def longest(counts: tuple[int, ...]) -> int:
        return max(each[count] for each, count in zip(own, counts, strict=True))

    found = balanced(own, units)
    assert found is not None
    assert sum(found) == units
    best = min(map(longest, every(units, len(own))))
    assert longest(found) == best
    assert found == max(counts for counts in every(units, len(own)) if longest(counts) == best)


def test_members_without_room_for_all_units() -> None:
    assert balanced([[0, 1, 2], [0, 5]], 3) == (2, 1)
    assert balanced([[0, 1], [0, 5]], 3) is None


class TestSeconds:
    def test_equal_parts_where_nothing_was_measured(self) -> None:
        assert LayerWidths(0).seconds("gpu", 8.0, 4) == [0.0, 2.0, 4.0, 6.0, 8.0]

    def test_a_part_between_two_that_were_measured_takes_as_long_as_the_larger_one(self) -> None:
        widths = LayerWidths(0, measured={"gpu": [Width(0.5, 1.0, 2.0), Width(1.0, 2.0, 2.0)]})
        assert widths.seconds("gpu", 4.0, 8) == [0.0, *[3.0] * 4, *[4.0] * 4]

    def test_a_part_that_was_measured_is_found_whatever_its_last_digits(self) -> None:
        measured = [Width(count / 49, count, 0.0) for count in range(1, 50)]
        found = LayerWidths(0, measured={"gpu": measured}).seconds("gpu", 49.0, 49)
        assert found == pytest.approx([*range(50)])

    def test_the_last_part_stands_for_what_is_larger(self) -> None:
        """A file that somebody has written may have no times of all channels."""
        widths = LayerWidths(0, measured={"gpu": [Width(0.25, 1.0, 0.0), Width(0.5, 2.0, 0.0)]})
        assert widths.seconds("gpu", 8.0, 4) == [0.0, 4.0, 8.0, 8.0, 8.0]

    def test_a_disturbed_measurement_does_not_make_more_take_less(self) -> None:
        widths = LayerWidths(0, measured={"gpu": [Width(0.5, 3.0, 6.0), Width(1.0, 4.0, 4.0)]})
        assert widths.seconds("gpu", 8.0, 2) == [0.0, 8.0, 8.0]

    def test_a_device_that_was_not_measured_is_like_one_that_was(self) -> None:
        widths = LayerWidths(0, measured={"gpu": [Width(0.5, 1.0, 2.0), Width(1.0, 2.0, 2.0)]})
        assert widths.seconds("other", 8.0, 2) == [0.0, 6.0, 8.0]


def profile(*layers: tuple[str, float], output: int = 0, units: int = 4, weights: int = 0) -> Profile:
    """Layers that divide, follow, sum or are whole, and so many seconds of the first device each; backwards take as
    long."""
    widths, run = {}, 0
    for number, (role, _) in enumerate(layers):
        run = number if role == "divides" else run
        own = {f"layer {number}": units} if role == "divides" else {}
        if role != "whole":
            widths[number] = LayerWidths(run, own, role == "sums")
    return Profile(
        "small",
        1,
        [LayerBytes(f"layer {number}", weights, 0, output) for number in range(len(layers))],
        {"a": [Times(each / 2, each / 2, 0.5) for _, each in layers]},
        {},
        widths=widths,
    )


def cluster(*speeds: float, link: Link | None = None) -> Cluster:
    return Cluster([Node("box", [Device("a", speed=each) for each in speeds], link or Link(float("inf")))])


@pytest.fixture
def free_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members' calls take no time of their own."""
    monkeypatch.setattr(module, "MEMBER_CALL", 0.0)


@pytest.mark.usefixtures("free_calls")
def test_what_follows_is_divided_alike() -> None:
    found = profile(("divides", 8.0), ("follows", 4.0), ("sums", 8.0), ("whole", 4.0), ("divides", 2.0))
    box = cluster(1.0, 1.0)
    times = group_times(found, box, box.slots)
    assert times.counts == dict.fromkeys([0, 1, 2, 4], (2, 2))
    assert [each.forward for each in times.times] == [2.0, 1.0, 2.0, 2.0, 0.5]
    assert [each.update for each in times.times] == [0.5] * 5


@pytest.mark.usefixtures("free_calls")
def test_sums_come_back_whole() -> None:
    box = cluster(1.0, 1.0, link=Link(16.0))
    parts = group_times(profile(("divides", 16.0), ("follows", 0.0), output=16), box, box.slots)
    sums = group_times(profile(("divides", 16.0), ("sums", 0.0), output=16), box, box.slots)
    assert parts.counts == {0: (2, 2), 1: (2, 2)}  # 8 + 2 * 0.5 seconds
    assert sums.counts == {0: (2, 2), 1: (2, 2)}
    assert [sum(each.forward + each.backward for each in one.times) for one in (parts, sums)] == [9.0, 10.0]


@pytest.mark.usefixtures("free_calls")
def test_uneven_devices_get_uneven_counts() -> None:
    box = cluster(3.0, 1.0)
    times = group_times(profile(("divides", 8.0)), box, box.slots)
    assert times.counts == {0: (3, 1)}
    assert times.times[0] == pytest.approx((1.0, 1.0, 0.5 / 3.0))


@pytest.mark.usefixtures("free_calls")
def test_transfers_count() -> None:
    """The input goes to the second device whole, and its part of the output comes back; gradients as well."""
    box = cluster(1.0, 1.0, link=Link(4.0))
    two = profile(("whole", 0.0), ("divides", 16.0), output=8)
    times = group_times(two, box, box.slots)
    assert times.counts == {1: (3, 1)}
    assert times.times[1].forward + times.times[1].backward == 12.0
    slow = cluster(1.0, 1.0, link=Link(1.0))
    assert group_times(two, slow, slow.slots).counts == {}


@pytest.mark.usefixtures("free_calls")
def test_weights_go_to_each_device_and_their_gradients_back() -> None:
    """The second device's half takes 12 seconds, and 2 * 2; of heavier weights a quarter takes 6, and 2 * 4."""
    box, layers = cluster(1.0, 1.0, link=Link(4.0)), [("divides", 16.0), ("sums", 8.0)]
    found = [group_times(profile(*layers, weights=weights), box, box.slots) for weights in (8, 32, 128)]
    assert [times.counts.get(0) for times in found] == [(2, 2), (3, 1), None]
    assert sum(each.forward + each.backward for each in found[0].times) == 16.0


def test_a_member_gets_no_more_than_it_has_room_for() -> None:
    box = cluster(1.0, 1.0)
    assert group_times(profile(("divides", 8.0)), box, box.slots, [1.0, 0.25]).counts == {0: (3, 1)}
    assert group_times(profile(("divides", 8.0)), box, box.slots, [1.0, 0.2]).counts == {}
    assert group_times(profile(("divides", 8.0)), box, box.slots, [0.5, 0.25]).counts == {}


def test_members_calls_count() -> None:
    """Calls of two members take 2 * 2 * 0.25 ms: less than dividing 3 ms gains, and more than dividing 1 ms."""
    box = cluster(1.0, 1.0)
    times = group_times(profile(("divides", 0.003), ("divides", 0.001)), box, box.slots)
    assert times.counts == {0: (2, 2)}
    assert times.times[0][:2] == pytest.approx((0.00125, 0.00125))
    assert times.times[1][:2] == (0.0005, 0.0005)
