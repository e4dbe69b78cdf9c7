"""The partition is contiguous and optimal: checked against every partition there is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetpipe.planning.model.cluster import Cluster
from lightning_hetpipe.planning.model.estimate import times_on
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.search.split_points import (
    partition,
    partition_within,
    split_points_in_order,
    stage_times,
)
from tests.planning.instances import clusters, profiles
from tests.support.marks import explores


def all_partitions(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *others) for others in combinations(range(1, layers), stages - 1)]


def bottleneck(times: Sequence[float], splits: Sequence[int]) -> float:
    return max(sum(times[a:b]) for a, b in zip(splits, [*splits[1:], len(times)], strict=True))


def preferred(times: Sequence[float], stages: int) -> tuple[int, ...]:
    """Among the best partitions the one whose last split is earliest, and before that split the same again."""
    if stages == 1:
        return (0,)
    candidates = all_partitions(len(times), stages)
    best = min(bottleneck(times, splits) for splits in candidates)
    last = min(splits[-1] for splits in candidates if bottleneck(times, splits) == best)
    return (*preferred(times[:last], stages - 1), last)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[float], int]:
    """Up to nine layers and some stages. Whole numbers, so that sums are exact and ties are ties."""
    times = draw(st.lists(st.integers(0, 12), min_size=1, max_size=9))
    return [float(t) for t in times], draw(st.integers(1, len(times)))


@settings(deadline=None)
@given(workloads())
def test_it_is_the_best_of_all(case: tuple[list[float], int]) -> None:
    times, stages = case
    splits = partition(times, stages)
    assert splits in all_partitions(len(times), stages)
    assert bottleneck(times, splits) == min(bottleneck(times, other) for other in all_partitions(len(times), stages))


@settings(deadline=None)
@given(workloads(), st.data())
def test_within_memory_it_is_the_best_of_those_that_fit(case: tuple[list[float], int], data: st.DataObject) -> None:
    """The least share of devices counts where no partition fits."""
    times, stages = case
    sizes = data.draw(st.lists(st.integers(0, 12), min_size=len(times), max_size=len(times)))
    room = data.draw(st.lists(st.integers(1, 30) | st.just(float("inf")), min_size=stages, max_size=stages))

    def share(splits: tuple[int, ...]) -> float:
        return max(size / each for size, each in zip(stage_times(sizes, splits), room, strict=True))

    found, every = partition_within(times, sizes, room), all_partitions(len(times), stages)
    fitting = [bottleneck(times, splits) for splits in every if share(splits) <= 1]
    assert found in every
    if fitting:
        assert share(found) <= 1
        assert bottleneck(times, found) == min(fitting)
    else:
        assert share(found) == pytest.approx(min(map(share, every)))


@settings(deadline=None)
@given(workloads())
def test_ties_are_settled_by_the_earliest_last_cut(case: tuple[list[float], int]) -> None:
    assert partition(*case) == preferred(*case)


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=8), st.integers(1, 8))
def test_measured_times_up_to_rounding(times: list[float], stages: int) -> None:
    stages = min(stages, len(times))
    best = min(bottleneck(times, other) for other in all_partitions(len(times), stages))
    assert bottleneck(times, partition(times, stages)) == pytest.approx(best, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("times", "stages", "splits"),
    [
        ([1.0, 1.0, 1.0, 1.0], 2, (0, 2)),
        ([5.0, 1.0, 1.0, 1.0], 2, (0, 1)),
        ([1.0, 1.0, 1.0, 5.0], 3, (0, 1, 3)),
        ([0.0, 0.0, 0.0], 2, (0, 1)),  # every split is as good: the earliest
        ([3.0, 1.0, 2.0], 3, (0, 1, 2)),
        ([3.0, 1.0, 2.0], 1, (0,)),
    ],
)
def test_examples(times: list[float], stages: int, splits: tuple[int, ...]) -> None:
    assert partition(times, stages) == splits


@settings(deadline=None)
@given(workloads())
def test_stage_times_are_the_sums_of_their_layers(case: tuple[list[float], int]) -> None:
    times, stages = case
    splits = partition(times, stages)
    found = stage_times(times, splits)
    assert len(found) == stages
    assert max(found) == bottleneck(times, splits)
    assert sum(found) == sum(times)


def test_stage_times_of_an_example() -> None:
    assert stage_times([1.0, 2.0, 4.0, 8.0], (0, 1, 3)) == [1.0, 6.0, 8.0]


@explores(60)
@given(profile=profiles(6), cluster=clusters(3), recompute=st.booleans())
def test_on_given_devices_it_is_the_best_of_all_with_as_many_stages(
    profile: Profile, cluster: Cluster, recompute: bool
) -> None:
    slots = cluster.slots[: len(profile.layers)]

    def slowest(splits: Sequence[int]) -> float:
        return max(each.total for each in times_on(profile, cluster, slots, splits, 1, recompute)[0])

    splits = split_points_in_order(profile, cluster, slots, recompute)
    every = all_partitions(len(profile.layers), len(slots))
    assert splits in every
    assert slowest(splits) == pytest.approx(min(map(slowest, every)), rel=1e-9)
