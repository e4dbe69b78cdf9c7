"""Law L1: which version a minibatch uses, and that Nm places are enough to keep them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetpipe.rules.versions import last_reader, version_of

IN_FLIGHT = st.integers(1, 9)
EMPTY_AT = st.integers(0, 50)


@pytest.mark.parametrize(
    ("in_flight", "empty_at", "versions"),
    [
        (1, 0, [0, 1, 2, 3, 4]),  # nothing runs ahead: minibatch p uses what p - 1 left
        (3, 0, [0, 0, 0, 1, 2]),
        (3, 7, [7, 7, 7, 8, 9]),  # a later epoch, which begins empty at version 7
    ],
)
def test_the_versions_of_the_first_minibatches(in_flight: int, empty_at: int, versions: list[int]) -> None:
    assert [version_of(empty_at + p, in_flight, empty_at) for p in range(1, 6)] == versions


@settings(deadline=None)
@given(IN_FLIGHT, EMPTY_AT, st.integers(1, 60))
def test_weights_are_at_most_a_pipeline_old_and_never_of_the_future(in_flight: int, empty_at: int, steps: int) -> None:
    minibatch = empty_at + steps
    version = version_of(minibatch, in_flight, empty_at)
    assert empty_at <= version < minibatch
    assert minibatch - 1 - version == min(steps, in_flight) - 1


@settings(deadline=None)
@given(IN_FLIGHT, EMPTY_AT, st.integers(0, 30))
def test_the_last_reader_is_the_last_one(in_flight: int, empty_at: int, age: int) -> None:
    version = empty_at + age
    readers = [p for p in range(empty_at + 1, version + 40) if version_of(p, in_flight, empty_at) == version]
    assert readers[-1] == last_reader(version, in_flight)


@settings(deadline=None)
@given(IN_FLIGHT, st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_as_many_places_as_minibatches_in_flight_are_enough(in_flight: int, epochs: list[int]) -> None:
    """Lightning publishes as late as it can; every reader finds its version."""
    version = 0
    for length in epochs:
        empty_at = version
        kept = {empty_at}
        for minibatch in range(empty_at + 1, empty_at + length + 1):
            for flying in range(minibatch, min(minibatch + in_flight, empty_at + length + 1)):
                assert version_of(flying, in_flight, empty_at) in kept
            version = minibatch
            kept = {v for v in kept if last_reader(v, in_flight) > version}
            kept.add(version)
            assert len(kept) <= in_flight
