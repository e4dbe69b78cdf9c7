"""Layers that all virtual workers have on one device: which device, which layers, and what that makes."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.allocation.allocator import Allocation, Allocator
from lightning_hetpipe.planning.allocation.grouping_search import best_allocation
from lightning_hetpipe.planning.allocation.groupings import GROUPINGS, PLACED
from lightning_hetpipe.planning.allocation.placed import ROUGH, Head, PlacedPlans, _rough, heads, placed
from lightning_hetpipe.planning.model.cluster import Cluster, Device, Link, Node
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.search.problem import PlanningProblem
from tests.planning.instances import profiles
from tests.support.marks import explores

WIDE = [LayerBytes(f"conv_{n}", 10, 40, 8, 20 if n == 0 else 0) for n in range(4)]
LAYERS = [*WIDE, LayerBytes("fc_1", 600, 16, 4), LayerBytes("fc_2", 300, 8, 4)]
TIMES = [*[Times(1.0, 2.0)] * 4, *[Times(0.1, 0.2)] * 2]
CLASSIFIER = Profile("classifier", 1, LAYERS, {"V": TIMES}, {})


def cluster(*counts: int, bandwidth: float = 10.0, memory: int | None = None) -> Cluster:
    """Nodes with so many devices."""
    nodes = [Node(f"node {index}", [Device("V", memory)] * count, Link(1e4)) for index, count in enumerate(counts)]
    return Cluster(nodes, Link(bandwidth))


def allocator(given: Cluster, profile: Profile = CLASSIFIER, in_flight: int | None = None) -> Allocator:
    return Allocator(PlanningProblem(profile, given, optimizer="sgd"), in_flight=in_flight)


def found(own: Allocator, shares: bool = False) -> Allocation:
    made = placed(own, shares=shares)
    assert made is not None
    return made


def allocate(own: Allocator, head: Head, shares: bool = False) -> Allocation:
    plans = PlacedPlans(own, head.first)
    return own.allocate(PLACED, head.grouping, shares=shares, placement="local", plans=plans)


def plan_of(made: Allocation, given: Cluster, profile: Profile = CLASSIFIER) -> Plan:
    return Plan.of(made, profile.model, [layer.name for layer in profile.layers], given)


def test_heavy_layers_with_little_work_are_placed() -> None:
    """Over a slow link plain virtual workers move parameters most of the time."""
    given = cluster(1, 1, 1)
    own = allocator(given)
    made, plain = found(own), own.allocate("np", GROUPINGS["np"](given, own.speed), shares=False)
    firsts = {choice.stages[-1].first for choice in made.choices if len(choice.stages) > 1}
    assert firsts == {4}
    assert {choice.stages[-1].slot for choice in made.choices} == {given.slots[0]}
    assert made.rate > 2 * plain.rate
    assert made.network_bytes < plain.network_bytes / 4
    assert list(plan_of(made, given).problems(given)) == []


@pytest.mark.parametrize("alone", [False, True])
def test_bytes_on_the_network_are_activations_batches_and_other_weights(alone: bool) -> None:
    given = cluster(1, 1, 1)
    (head,) = (each for each in heads(allocator(given)) if each.first == 4 and len(each.grouping) == 2 + alone)
    made = allocate(allocator(given, in_flight=3), head)
    minibatches = sum(made.lengths)
    crossing = 2 * made.lengths[0] * (20 + 2 * 8)  # the batch there, activations and their gradients
    weights = (len(head.grouping) - 1) * 2 * 4 * 10  # but those of the first virtual worker
    assert made.network_bytes == pytest.approx((crossing + weights) / minibatches)
    assert made.lengths == (3,) * len(head.grouping)


small = st.lists(st.integers(1, 2), min_size=2, max_size=3)


@explores(15)
@given(profiles(4), small, st.sampled_from([2.0, 20.0]), st.booleans(), st.sampled_from([None, 60, 150]))
def test_the_search_is_no_worse_than_all_choices(
    profile: Profile, counts: list[int], bandwidth: float, shares: bool, memory: int | None
) -> None:
    """Nor is one of them much faster than its rough estimate."""
    times = {"V": [replace_zero(each) for each in profile.times["fast"]]}
    own = allocator(cluster(*counts, bandwidth=bandwidth, memory=memory), replace(profile, times=times))
    if not (all_ := [*heads(own)]):
        with pytest.raises(SettingError, match="use 'np' or 'auto'"):
            placed(own, shares=shares)
        return
    made = {head: allocate(own, head, shares) for head in all_}
    best = found(own, shares)
    assert best.fits is any(each.fits for each in made.values())
    assert best.rate >= 0.99 * max(each.rate for each in made.values())
    for head, each in made.items():
        assert each.rate <= 1.03 * ROUGH * _rough(own, head, shares, "local").rate


def replace_zero(times: Times) -> Times:
    return Times(times.forward + 1, times.backward + 1)


def test_few_of_many_choices_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    own = allocator(cluster(1, 2, 1, 3), in_flight=3)
    all_ = [*heads(own)]
    assert len(all_) == 5 * (2 + 1 + 1)
    best = max(allocate(own, head).rate for head in all_)
    monkeypatch.setattr(own, "allocate", simulated := Mock(wraps=own.allocate))
    assert found(own).rate >= 0.99 * best
    assert simulated.call_count < len(all_) / 2


def test_a_device_holds_the_last_stages_of_all() -> None:
    """Each fits there alone."""
    free = cluster(1, 1, 1, 1)
    (head,) = (each for each in heads(allocator(free)) if each.first == 4 and len(each.grouping) == 3)
    needed = allocate(allocator(free, in_flight=2), head).choices[0].stages[-1].memory.total
    for memory, fits in ((3 * needed, True), (3 * needed - 1, False), (needed, False)):
        given = cluster(1, 1, 1, 1, memory=memory)
        (head,) = (each for each in heads(allocator(given)) if each.first == 4 and len(each.grouping) == 3)
        made = allocate(allocator(given, in_flight=2), head)
        assert made.fits is fits
        assert made.unfit == (() if fits else (0, 1, 2))
        assert made.lacking == (0 if fits else 3 * needed - memory)
        said = [problem.place for problem in plan_of(made, given).problems(given)]
        assert said == ([] if fits else ["virtual_workers[2].stages[1].memory_bytes"])


def test_fewer_are_in_flight_where_a_device_does_not_hold_the_last_stages() -> None:
    free = cluster(1, 1, 1, 1)
    (head,) = (each for each in heads(allocator(free)) if each.first == 4 and len(each.grouping) == 3)
    most = allocate(allocator(free), head)
    room = 3 * allocate(allocator(free, in_flight=1), head).choices[0].stages[-1].memory.total
    given = cluster(1, 1, 1, 1, memory=room)
    (head,) = (each for each in heads(allocator(given)) if each.first == 4 and len(each.grouping) == 3)
    made = allocate(allocator(given), head)
    assert made.fits
    assert (made.in_flight, most.in_flight > 1) == (1, True)


def test_several_devices_of_a_node_are_before_the_last_stage() -> None:
    given = cluster(3, 2)
    made = found(allocator(given))
    head = made.choices[0].stages[-1].slot
    assert {choice.stages[-1].slot for choice in made.choices} == {head}
    for choice in made.choices:
        assert len({stage.slot for stage in choice.stages}) == len(choice.stages)
        assert len({stage.slot.node for stage in choice.stages[:-1]}) == 1
    assert {slot for group in made.grouping for slot in group} == {*given.slots}


def test_auto_places_layers_where_that_is_faster() -> None:
    given = cluster(1, 1, 1)
    best = best_allocation(allocator(given), shares=False, placements=("size", "local"))
    assert (best.name, best.placement, best.rate) == ("auto", "local", found(allocator(given)).rate)
    assert {choice.stages[-1].slot for choice in best.choices} == {given.slots[0]}
    quick = cluster(1, 1, 1, bandwidth=1e6)
    best = best_allocation(allocator(quick), shares=False, placements=("size", "local"))
    assert len({slot for group in best.grouping for slot in group}) == sum(map(len, best.grouping))


@pytest.mark.parametrize(("counts", "stages"), [((4,), None), ((1, 1, 1), 1)])
def test_what_shares_no_device_is_refused(counts: tuple[int, ...], stages: int | None) -> None:
    own = Allocator(PlanningProblem(CLASSIFIER, cluster(*counts), optimizer="sgd", stages=stages))
    with pytest.raises(SettingError, match="allocation='placed' has the last of at least two stages"):
        placed(own, shares=False)


def test_as_many_stages_as_asked_for() -> None:
    own = Allocator(PlanningProblem(CLASSIFIER, cluster(2, 2, 1), optimizer="sgd", stages=3))
    assert {len(choice.stages) for choice in found(own).choices} == {3}


def test_a_plan_shares_a_device_among_last_stages_alone() -> None:
    given = cluster(1, 1, 1)
    plan = plan_of(found(allocator(given)), given)
    one, two, *_ = plan.virtual_workers
    first = replace(two.stages[0], node=one.stages[0].node, device=one.stages[0].device)
    other = replace(plan, virtual_workers=(one, replace(two, stages=(first, *two.stages[1:]))))
    (problem,) = other.problems(given)
    assert problem.place == "virtual_workers[1].stages[0].device"
    assert problem.said == "is 'V:0', which is virtual worker 0's, too, and only last stages share a device"


def test_a_run_of_one_has_its_part_of_a_shared_device() -> None:
    given = cluster(1, 1, 1, 1, memory=30_000)
    (head,) = (each for each in heads(allocator(given)) if each.first == 4 and len(each.grouping) == 3)
    plan = plan_of(allocate(allocator(given, in_flight=2), head), given)
    taken = [worker.stages[-1].memory_bytes for worker in plan.virtual_workers]
    limits = [plan.of_worker(index).virtual_workers[0].stages[-1].memory_limit_bytes for index in range(3)]
    assert limits == [each + (30_000 - sum(taken)) // 3 for each in taken]
    assert plan.of_worker(0).virtual_workers[0].stages[0] == plan.virtual_workers[0].stages[0]
