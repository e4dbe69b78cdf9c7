"""Allocations of a cluster: what virtual workers make together, and the search for the best grouping."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.allocation.allocator import JITTER, Allocation, Allocator, GroupPlans, worker_pipelines
from lightning_hetpipe.planning.allocation.grouping_search import ENOUGH, best_allocation
from lightning_hetpipe.planning.allocation.groupings import GROUPINGS, Grouping
from lightning_hetpipe.planning.model.cluster import Cluster, Device, Link, Node
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.model.simulate import Crossing
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.rules.versions import POLICIES, SYNC
from tests.planning.instances import profiles
from tests.support.marks import explores

SPEEDS = {"V": 4.0, "R": 3.0, "G": 2.0, "Q": 1.0}
LAYERS = [LayerBytes(f"layer {n}", parameters=10, kept=20, output=2) for n in range(8)]
PROFILE = Profile("eight", 1, LAYERS, {name: [Times(1 / speed, 2 / speed)] * 8 for name, speed in SPEEDS.items()}, {})


def cluster(*nodes: list[str], memory: int | None = None, link: Link | None = None) -> Cluster:
    return Cluster(
        [Node(f"node {index}", [Device(name, memory) for name in own], Link(1e3)) for index, own in enumerate(nodes)],
        link or Link(100.0),
    )


PAPER = cluster(["V"] * 2, ["R"] * 2, ["G"] * 2, ["Q"] * 2)


@cache
def allocator(in_flight: int | None = None) -> Allocator:
    return Allocator(PlanningProblem(PROFILE, PAPER, optimizer="sgd"), in_flight=in_flight)


def allocate(name: str, *, shares: bool = False, placement: str = "size") -> Allocation:
    own = allocator()
    return own.allocate(name, GROUPINGS[name](PAPER, own.speed), shares=shares, placement=placement)


def test_the_slowest_virtual_worker_holds_up_all_without_shares() -> None:
    """DESIGN, section 13: N * min X_v without shares, and the sum with them, less what synchronisation costs."""
    equal, shared = allocate("np"), allocate("np", shares=True)
    rates = [choice.rate for choice in equal.choices]
    assert 0.9 * 4 * min(rates) <= equal.rate <= 4 * min(rates) * 1.001
    rates = [choice.rate for choice in shared.choices]
    assert 0.85 * sum(rates) <= shared.rate <= sum(rates) * 1.001
    assert shared.rate > 1.5 * equal.rate
    assert equal.lengths == (equal.in_flight,) * 4
    assert min(shared.lengths) >= shared.in_flight
    assert sum(shared.rates) == pytest.approx(shared.rate)


def test_equal_virtual_workers_need_no_shares() -> None:
    assert allocate("ed").rate == allocate("ed", shares=True).rate


def test_local_placement_keeps_updates_within_nodes() -> None:
    """The paper's ED-local: stage j of every virtual worker lies on node j."""
    near, far = allocate("ed", placement="local"), allocate("ed")
    activations = sum(2 * LAYERS[stage.first].output for stage in near.choices[0].stages[1:])
    assert near.network_bytes == pytest.approx(activations)
    assert far.network_bytes > 2 * near.network_bytes


def test_local_placement_is_as_in_a_run() -> None:
    """A run leaves all beside virtual worker 0; the plan had it on the node with more virtual workers. Servers are in
    the order of virtual workers, of which the first lies on the second node here."""
    three = cluster(["V"] * 2, ["R"] * 2, ["G"] * 2)
    at = {(slot.node, slot.number): slot for slot in three.slots}
    grouping = ((at[1, 0], at[1, 1]), (at[2, 0],), (at[2, 1],), (at[0, 0],), (at[0, 1],))
    found = Allocator(PlanningProblem(PROFILE, three, optimizer="sgd")).allocate(
        "auto", grouping, shares=False, placement="local"
    )
    plan = Plan.of(found, "eight", [layer.name for layer in LAYERS], three)
    assert (
        [three.nodes[node].name for node in found.servers] == [*plan.workers_on_nodes] == ["node 1", "node 2", "node 0"]
    )
    assert found.simulation is not None
    weights = sum(layer.parameters for layer in LAYERS)
    served = {
        f"{name} server in": weights * 5 * found.simulation.waves * (name == "node 1") for name in plan.workers_on_nodes
    }
    assert {name: nbytes for name, nbytes in found.simulation.traffic.items() if name in served} == served


def test_equal_virtual_workers_do_not_do_the_same_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With times equal to the last digit all sent their activations at the same moment, and planned too little."""
    own = Allocator(
        PlanningProblem(PROFILE, cluster(["V"] * 2, ["R"] * 2, ["G"] * 2, ["Q"] * 2, link=Link(4.0)), optimizer="sgd"),
        in_flight=6,
    )
    found = []
    for jitter in (JITTER, 1e-4, 0.0):
        monkeypatch.setattr("lightning_hetpipe.planning.allocation.allocator.JITTER", jitter)
        found.append(own.allocate("ed", GROUPINGS["ed"](own.cluster, own.speed), shares=False, placement="local").rate)
    assert min(found[:2]) > 1.1 * found[2], "how small the differences are does not matter"


def test_staleness_grows_with_the_waves_of_others() -> None:
    """s_global of equal waves is HetPipe's, section 5.2, with s_local = Nm - 1."""
    equal = allocate("ed")
    assert equal.staleness == 2 * equal.in_flight - 2
    assert allocate("np", shares=True).staleness > allocate("np").staleness


def test_more_in_flight_hides_synchronisation() -> None:
    """Nm is raised above what a pipeline needs alone."""
    slow = cluster(["V"] * 2, ["V"] * 2, link=Link(10.0))
    own = Allocator(PlanningProblem(PROFILE, slow, optimizer="sgd"))
    grouping = GROUPINGS["np"](slow, own.speed)
    found = own.allocate("np", grouping, shares=False)
    assert found.in_flight > own.plans.plan(grouping[0]).in_flight


def test_no_more_are_in_flight_than_the_weight_policy_can_have() -> None:
    """It was refused, as if somebody had asked for so many."""
    slow = cluster(["V"] * 2, ["V"] * 2, link=Link(10.0))
    own = Allocator(PlanningProblem(PROFILE, slow, optimizer="sgd", weights=POLICIES["2bw"], every=2))
    assert own.allocate("np", GROUPINGS["np"](slow, own.speed), shares=False).in_flight == 2


def test_nothing_is_simulated_where_a_virtual_worker_lacks_memory() -> None:
    """Two devices of a node hold 8 layers; one does not."""
    small = cluster(["V"] * 2, ["Q"], memory=400)
    own = Allocator(PlanningProblem(PROFILE, small, optimizer="sgd"), in_flight=1)
    found = own.allocate("np", GROUPINGS["np"](small, own.speed), shares=False)
    assert (found.fits, found.rate, found.unfit) == (False, 0.0, (1,))


def test_waves_of_whole_optimizer_steps() -> None:
    """A policy by window has them, and so have unequal shares, which a run refuses otherwise."""
    own = Allocator(PlanningProblem(PROFILE, PAPER, optimizer="sgd", weights=SYNC, every=4), in_flight=3)
    assert own.waves([1.0, 1.0], 3, shares=False) == (4, 4)
    assert own.waves([1.0, 2.0], 3, shares=True) == (4, 8)
    own = Allocator(PlanningProblem(PROFILE, PAPER, optimizer="sgd", every=4), in_flight=3)
    assert own.waves([1.0, 1.0], 3, shares=False) == (3, 3)
    assert own.waves([1.0, 2.0], 3, shares=True) == (4, 8)


def test_alike_groups_are_planned_once() -> None:
    plans = GroupPlans(PlanningProblem(PROFILE, PAPER, optimizer="sgd"))
    one, other = GROUPINGS["hd"](PAPER, lambda slot: SPEEDS[slot.device.name])[:2]
    first, second = plans.plan(one), plans.plan(other)
    assert len(plans) == 1
    assert first.rate == second.rate == best_plan(PlanningProblem(PROFILE, PAPER, one, optimizer="sgd")).rate
    assert {stage.slot for stage in second.stages} | {*second.idle} == {*other}
    assert [stage.slot.device for stage in first.stages] == [stage.slot.device for stage in second.stages]


def test_what_stages_on_two_nodes_send_each_other_crosses_the_network() -> None:
    two = cluster(["V"], ["V"], link=Link(1.0, 0.5))
    choice = best_plan(PlanningProblem(PROFILE, two, optimizer="sgd"), 3)
    (pipeline,) = worker_pipelines(PROFILE, two, [choice], [3], [], "size") if len(choice.stages) > 1 else [None]
    assert pipeline is not None
    source, target = (stage.slot.node for stage in choice.stages)
    assert (pipeline.forwards, pipeline.gradients) == (
        {1: Crossing(2, source, target)},
        {0: Crossing(2, target, source)},
    )
    assert pipeline.stages[1].receive == pipeline.stages[0].receive_gradient == 0.5


@pytest.mark.parametrize("shares", [False, True])
def test_the_search_is_not_slower_than_the_papers_groupings(shares: bool) -> None:
    found = best_allocation(allocator(), shares=shares, placements=("size", "local"))
    named = [allocate(name, shares=shares, placement=how) for name in GROUPINGS for how in ("size", "local")]
    assert found.rate >= ENOUGH * max(each.rate for each in named)


def test_of_groupings_that_are_about_as_fast_the_one_with_the_fewest_virtual_workers_is_chosen() -> None:
    """Two pipelines make no more than one of both nodes, whose stages are equal, too."""
    free = cluster(["V"] * 2, ["V"] * 2, link=Link(float("inf")))
    found = best_allocation(Allocator(PlanningProblem(PROFILE, free, optimizer="sgd")), shares=False)
    assert len(found.grouping) == 1


def test_of_as_few_virtual_workers_the_least_stale_allocation_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be slower by 3%."""
    own, made = Allocator(PlanningProblem(PROFILE, PAPER, optimizer="sgd")), Allocator.allocate

    def allocate_(
        self: Allocator, name: str, grouping: Grouping, *, shares: bool, placement: str = "size"
    ) -> Allocation:
        found = made(self, name, grouping, shares=shares, placement="size")
        if placement == "size":
            return found
        stale = replace(found, placement="local", clock_distance=4)
        stale.__dict__["rate"] = 1.01 * found.rate
        return stale

    monkeypatch.setattr(Allocator, "allocate", allocate_)
    assert best_allocation(own, shares=False, placements=("size", "local")).placement == "size"


def used(found: Allocation) -> set[int]:
    """The nodes with a stage."""
    return {stage.slot.node for choice in found.choices for stage in choice.stages}


@pytest.mark.parametrize("shares", [False, True])
def test_a_device_that_is_of_no_use_is_left_out(shares: bool) -> None:
    """One is too slow for a layer, another too small for one."""
    devices = [Device("V"), Device("V"), Device("V", speed=0.01), Device("V", 25)]
    given = Cluster([Node(str(index), [device]) for index, device in enumerate(devices)], Link(100.0))
    found = best_allocation(Allocator(PlanningProblem(PROFILE, given, optimizer="sgd")), shares=shares)
    assert found.fits
    assert used(found) == {0, 1}


def test_where_nothing_fits_the_least_is_lacking() -> None:
    found = best_allocation(
        Allocator(PlanningProblem(PROFILE, cluster(["V"], ["V"], memory=10), optimizer="sgd")), shares=True
    )
    assert not found.fits


def test_an_allocation_makes_a_plan_of_all_virtual_workers() -> None:
    found = allocate("np", shares=True, placement="local")
    plan = Plan.of(found, "eight", [layer.name for layer in LAYERS], PAPER)
    assert list(plan.problems(PAPER)) == []
    assert (plan.allocation, plan.placement, plan.in_flight) == ("np", "local", found.in_flight)
    assert plan.waves == found.lengths
    assert plan.global_staleness == found.staleness
    assert [worker.nodes for worker in plan.virtual_workers] == [(f"node {index}",) for index in range(4)]
    assert sum(worker.minibatches_per_second for worker in plan.virtual_workers) == pytest.approx(found.rate)
    assert plan.bottleneck_s == max(choice.bottleneck for choice in found.choices)


kinds = st.lists(st.lists(st.sampled_from(["fast", "slow"]), min_size=1, max_size=2), min_size=2, max_size=3)


@explores(12)
@given(profiles(4), kinds, st.sampled_from([1.0, 5.0, 100.0]), st.booleans(), st.sampled_from([None, 60]))
def test_the_search_is_never_worse_than_np_ed_and_hd(
    profile: Profile, nodes: list[list[str]], bandwidth: float, shares: bool, memory: int | None
) -> None:
    """No grouping of the paper's is faster by more than 3%, or as fast with fewer virtual workers."""
    given = cluster(*nodes, memory=memory, link=Link(bandwidth))
    own = Allocator(PlanningProblem(profile, given, optimizer="sgd"))
    found = best_allocation(own, shares=shares)
    for name, group in GROUPINGS.items():
        try:
            grouping = group(given, own.speed)
        except SettingError:
            continue
        other = own.allocate(name, grouping, shares=shares)
        assert found.rate >= ENOUGH * other.rate
        assert (
            len(found.grouping) <= len(grouping)
            or found.rate > other.rate / ENOUGH
            or not other.fits
            or (found.rate * ENOUGH > other.rate)
        )
