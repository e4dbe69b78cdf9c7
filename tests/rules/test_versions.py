"""Weight policies: which weights a minibatch uses, and that these are there, in few buffers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetpipe.rules.versions import POLICIES, STASH, Reading, Versions

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
    used = Versions(STASH, in_flight, empty_at=empty_at, start=empty_at)
    assert [used.version(empty_at + p) for p in range(1, 6)] == versions


@pytest.mark.parametrize(
    ("policy", "every", "versions", "steps"),
    [
        ("stash", 2, [0, 0, 0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 1, 1, 1, 1, 1]),
        ("sync", 1, [0, 1, 2, 3, 4, 5, 6, 7, 8], [0] * 9),
        ("sync", 4, [0, 0, 0, 0, 4, 4, 4, 4, 8], [0] * 9),
        ("2bw", 3, [0, 0, 0, 0, 0, 0, 3, 3, 3], [0, 0, 0, 1, 1, 1, 1, 1, 1]),
        ("spectrain", 3, [0, 0, 0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 0, 1, 1, 0]),
        ("xpipe", 1, [0, 0, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 2, 2, 2, 2, 2, 2]),
        ("xpipe", 3, [0, 0, 0, 1, 1, 1, 4, 4, 4], [0, 0, 0, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_the_weights_of_each_policy(policy: str, every: int, versions: list[int], steps: list[int]) -> None:
    """With three in flight, from an epoch's beginning on."""
    used = Versions(POLICIES[policy], 3, every, 10, 10)
    assert [used.version(10 + p) - 10 for p in range(1, 10)] == versions
    assert [used.steps(10 + p) for p in range(1, 10)] == steps
    predicted = steps if POLICIES[policy].predicts else [0] * 9
    assert [used.reading(10 + p).steps for p in range(1, 10)] == predicted


@settings(deadline=None)
@given(IN_FLIGHT, EMPTY_AT, st.integers(1, 60))
def test_weights_are_at_most_a_pipeline_old_and_never_of_the_future(in_flight: int, empty_at: int, steps: int) -> None:
    minibatch = empty_at + steps
    used = Versions(STASH, in_flight, empty_at=empty_at, start=empty_at)
    version = used.version(minibatch)
    assert empty_at <= version < minibatch
    assert used.steps(minibatch) == minibatch - 1 - version == min(steps, in_flight) - 1


@settings(deadline=None)
@given(IN_FLIGHT, EMPTY_AT, st.integers(0, 30), st.sampled_from(sorted(POLICIES)), st.integers(1, 5))
def test_the_first_reader_is_the_first_one(in_flight: int, empty_at: int, age: int, policy: str, every: int) -> None:
    used = Versions(POLICIES[policy], in_flight, every, empty_at, empty_at)
    version = empty_at + age
    readers = (p for p in range(version + 1, version + 100) if used.version(p) >= version)
    assert next(readers) == used.first_reader(version)


@settings(deadline=None)
@given(
    IN_FLIGHT,
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_few_buffers_are_enough(in_flight: int, epochs: list[int], policy: str, every: int, resumed: int) -> None:
    """Lightning publishes as late as it can; every reader finds its weights, and those that differ are few."""
    every = max(every, in_flight) if policy == "2bw" else every
    version = resumed
    for length in epochs:
        used = Versions(POLICIES[policy], in_flight, every, version, version - resumed)
        kept: dict[Reading, int] = dict.fromkeys(used.needed(version), 0)  # with how many steps came before
        taken = 0
        for minibatch in range(version + 1, version + length + 1):
            for flying in range(minibatch, min(minibatch + used.ahead(version), minibatch + length)):
                assert used.reading(flying) in kept
            version = minibatch
            taken += (version - used.start) % every == 0
            needed = used.needed(version)
            kept = {reading: before for reading, before in kept.items() if reading in needed}
            kept.update((reading, taken) for reading in needed if reading not in kept)
            assert all(reading.version == version for reading in needed if reading not in kept)
            assert _distinct(kept) <= used.policy.buffers(used)
        resumed = 0


def _distinct(kept: Mapping[Reading, int]) -> int:
    """Number of weights that differ, as versions with as many steps before them are equal."""
    return len({(before, reading.steps) for reading, before in kept.items()})


@pytest.mark.parametrize("policy", ["stash", "spectrain", "xpipe"])
def test_all_buffers_are_used(policy: str) -> None:
    for in_flight, every in itertools.product(range(1, 14), range(1, 14)):
        used = Versions(POLICIES[policy], in_flight, every)
        held = [used.needed(version) for version in range(in_flight + every, in_flight + 3 * every)]
        most = max(_distinct({each: each.version // every for each in needed}) for needed in held)
        assert most == used.policy.buffers(used), (in_flight, every)


def test_no_more_are_in_flight_than_there_are_weights_for() -> None:
    assert [Versions(POLICIES["sync"], 3, 4).ahead(version) for version in range(9)] == [3, 3, 2, 1] * 2 + [3]
    assert [Versions(STASH, 3, 4).ahead(version) for version in range(4)] == [3] * 4
