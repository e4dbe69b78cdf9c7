"""Shares of unequal virtual workers, against brute force, a simulated timeline and counting."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetpipe.rules.versions import STASH, Versions
from lightning_hetpipe.rules.waves import (
    dealt,
    dealt_samples,
    next_lengths,
    staleness_bound,
    throughput,
    wave_lengths,
)
from tests.oracle_policies import global_staleness

SEVERAL = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("rates", "in_flight", "lengths"),
    [
        ([1.0, 1.0], 4, (4, 4)),
        ([7.0], 3, (3,)),
        ([1.0, 2.0], 4, (4, 8)),
        ([2.0, 1.0], 1, (2, 1)),
        ([1.0, 0.8, 0.5, 0.3], 2, (10, 8, 5, 3)),
        ([1.0, 0.99], 4, (4, 4)),
        ([1.0, 1.5], 1, (2, 3)),
    ],
)
def test_waves_in_proportion_to_rates(rates: list[float], in_flight: int, lengths: tuple[int, ...]) -> None:
    assert wave_lengths(rates, in_flight) == lengths


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 3))
def test_wave_lengths_are_the_smallest_that_suffice(rates: list[int], in_flight: int) -> None:
    found = wave_lengths(rates, in_flight)
    assert min(found) >= in_flight
    assert throughput(found, rates) >= 0.97 * sum(rates)
    every = itertools.product(range(in_flight, sum(found) + 1), repeat=len(rates))
    smaller = (lengths for lengths in every if sum(lengths) < sum(found))
    assert not any(throughput(lengths, rates) >= 0.97 * sum(rates) for lengths in smaller)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12), st.integers(1, 8), st.sampled_from([0.25, 4.0, 1024.0]))
def test_wave_lengths_reach_the_sum_whatever_the_unit(rates: list[float], in_flight: int, unit: float) -> None:
    found = wave_lengths(rates, in_flight)
    assert throughput(found, rates) >= 0.97 * sum(rates) * (1 - 1e-9)
    assert wave_lengths([rate * unit for rate in rates], in_flight) == found


def test_a_thousand_virtual_workers_have_lengths_in_no_time() -> None:
    lengths = wave_lengths([1.0, 0.8, 0.5, 0.3] * 250, 4)
    assert len(lengths) == 1000
    assert lengths[3] == 4


@pytest.mark.parametrize(
    ("lengths", "rates", "following"),
    [
        ((2, 2), (2.0, 5.0), (2, 5)),
        ((2, 5), (2.1, 4.7), (2, 5)),  # 96 % of the sum: within the noise
        ((2, 5), (2.0, 3.0), (2, 3)),
        ((2, 5), (2.0, 2.0), (2, 2)),
        ((2, 2), (1.0, 1.15), (2, 2)),  # all that could be gained is 7 %
    ],
)
def test_shares_change_where_it_is_worth_it(
    lengths: tuple[int, ...], rates: tuple[float, ...], following: tuple[int, ...]
) -> None:
    assert next_lengths(lengths, rates, 2) == following


@pytest.mark.parametrize("distance", [0, 1, 4])
@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(4, 4), (4, 6), (6, 5, 4), (4, 9, 13)])
def test_staleness_bound_is_what_a_timeline_reaches(lengths: tuple[int, ...], in_flight: int, distance: int) -> None:
    """All waves take one unit of time; the first D waves of the others are what a pull need not have."""
    versions = Versions(STASH, in_flight)
    for vw, of in itertools.product(range(len(lengths)), repeat=2):
        own, most = lengths[vw], 0
        for p in range((distance + 3) * own):  # minibatch p, from 0, computes on version p + 1 - Nm
            included = max(0, versions.version(p + 1) // own - distance) * lengths[of]
            done = -(-p * lengths[of] // own)  # by the others, until this one is due
            most = max(most, done - included)
        assert most == staleness_bound(lengths, vw, of, in_flight, distance)


@pytest.mark.parametrize(("in_flight", "distance"), [(1, 0), (4, 0), (4, 3)])
def test_staleness_bound_of_equal_waves_is_the_paper_s(in_flight: int, distance: int) -> None:
    for of in (0, 1):
        bound = staleness_bound([in_flight] * 2, 0, of, in_flight, distance)
        assert bound == global_staleness(in_flight, distance)


@settings(deadline=None)
@given(st.integers(0, 200), SEVERAL)
def test_an_epoch_is_dealt_once_in_as_many_waves_everywhere(minibatches: int, lengths: list[int]) -> None:
    waves = [list(dealt(minibatches, lengths, vw)) for vw in range(len(lengths))]
    assert Counter(m for mine in waves for wave in mine for m in wave) == Counter(range(minibatches))
    assert {len(mine) for mine in waves} == {-(-minibatches // sum(lengths))}
    for mine, length in zip(waves, lengths, strict=True):
        assert all(len(wave) == length for wave in mine[:-1])
        assert not mine or len(mine[-1]) <= length
        assert [m for wave in mine for m in wave] == sorted(m for wave in mine for m in wave)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 14), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_the_last_wave_takes_the_shortest_time(minibatches: int, lengths: list[int]) -> None:
    last = [len(list(dealt(minibatches, lengths, vw))[-1]) for vw in range(len(lengths))]
    only = len(lengths) <= minibatches <= sum(lengths)
    assert not only or min(last) >= 1
    every = itertools.product(*(range(int(only), length + 1) for length in lengths))
    times = [
        max(count / length for count, length in zip(counts, lengths, strict=True))
        for counts in every
        if sum(counts) == sum(last)
    ]
    assert max(count / length for count, length in zip(last, lengths, strict=True)) == min(times)


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 7), SEVERAL, st.booleans())
def test_each_sample_is_dealt_once(samples: int, batch_size: int, lengths: list[int], drop_last: bool) -> None:
    mine = [list(dealt_samples(samples, batch_size, lengths, vw, drop_last)) for vw in range(len(lengths))]
    kept = samples - samples % batch_size if drop_last else samples
    assert Counter(s for waves in mine for wave in waves for s in wave) == Counter(range(kept))
    assert drop_last or samples < len(lengths) or all(sum(map(len, waves)) for waves in mine)
    if not drop_last and samples <= batch_size * (len(lengths) - 1):
        return
    # Cut into batches one after the other, as a DataLoader does, they are the minibatches that were dealt.
    total = kept // batch_size if drop_last else -(-samples // batch_size)
    for vw, waves in enumerate(mine):
        order = [s for wave in waves for s in wave]
        batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        numbers = [m for wave in dealt(total, lengths, vw) for m in wave]
        assert [batch[0] // batch_size for batch in batches] == numbers
