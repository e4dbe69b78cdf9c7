"""Division of a model among devices before its layers are known."""

from __future__ import annotations

from itertools import combinations_with_replacement

from hypothesis import given
from hypothesis import strategies as some

from lightning_hetpipe.planning.search.split_points import divided


def largest(sizes: list[int], room: list[float], stages: list[int]) -> float:
    taken = [sum(size for size, own in zip(sizes, stages, strict=True) if own == stage) for stage in range(len(room))]
    return max(each / one for each, one in zip(taken, room, strict=True))


@given(
    some.lists(some.integers(0, 20), min_size=1, max_size=7),
    some.lists(some.sampled_from([1.0, 2.0, 3.5]), min_size=1, max_size=3),
)
def test_no_other_division_in_order_has_a_smaller_largest_share(sizes: list[int], room: list[float]) -> None:
    found = divided(sizes, room)
    assert found == sorted(found)
    assert set(found) <= set(range(len(room)))
    every = combinations_with_replacement(range(len(room)), len(sizes))
    least = min(largest(sizes, room, list(stages)) for stages in every)
    # Bytes are whole, so that half of one decides nothing.
    assert largest(sizes, room, found) <= least + 0.5 / min(room) + 1e-6
