"""Divisions have the least period there is, and all below a limit are found: checked against every split and order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.planning.model.cluster import NO_LINK, Cluster, Device, Link, Node
from lightning_hetpipe.planning.model.costs import Division
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.model.simulate import StageLoad
from lightning_hetpipe.planning.search import divider
from lightning_hetpipe.planning.search.divider import CLOSE
from lightning_hetpipe.planning.search.problem import PlanningProblem
from tests.planning.instances import NAMES, Stages, clusters, divisions, profiles, takes
from tests.support.marks import explores

ALWAYS = 1 << 20
"""Nm at which the period is T_max."""


def period(profile: Profile, cluster: Cluster, stages: Stages, in_flight: int, recompute: bool = False) -> float:
    found = takes(profile, cluster, stages, recompute)
    return max(max(found), sum(found) / in_flight)


def has_room(problem: PlanningProblem, stages: Stages, in_flight: int) -> bool:
    """True if every stage has room for what it holds at the least."""
    for index, (slot, first, after) in enumerate(stages):
        held = least_loads(in_flight, index, len(stages))
        needed = max(problem.memory.stage(first, after, load, in_flight).total for load in held)
        if slot.device.memory is not None and needed > slot.device.memory:
            return False
    return True


def least_loads(in_flight: int, index: int, stages: int) -> list[StageLoad]:
    """Loads that stage ``index`` has at the least: the first of several holds all that start at once."""
    at_once = [StageLoad(in_flight, 0, 1)] if index == 0 < stages - 1 else []
    return [StageLoad(1, 0, 1), StageLoad(0, 1, 0), *at_once]


def least(problem: PlanningProblem, in_flight: int = ALWAYS, room_for: int = 2) -> Division | None:
    found = problem.divider.least(in_flight, problem.room(room_for))
    return found[0] if found else None


def signature(problem: PlanningProblem, stages: Stages) -> tuple[object, ...]:
    """Kinds and split points, the same for interchangeable devices and nodes."""
    costs = problem.costs
    kinds = tuple(next(n for n, kind in enumerate(costs.kinds) if slot in kind.slots) for slot, *_ in stages)
    return costs.alike(kinds), tuple(first for _, first, _ in stages)


@explores(120)
@given(
    profile=profiles(6),
    cluster=clusters(),
    ordered=st.booleans(),
    stages=st.one_of(st.none(), st.integers(1, 4)),
    in_flight=st.integers(1, 5),
    recompute=st.booleans(),
)
def test_it_is_the_best_of_all_and_all_others_are_found(
    profile: Profile, cluster: Cluster, ordered: bool, stages: int | None, in_flight: int, recompute: bool
) -> None:
    if stages is not None:
        stages = min(stages, len(profile.layers), len(cluster.slots))
    problem = PlanningProblem(profile, cluster, optimizer=2.0, ordered=ordered, recompute=recompute, stages=stages)
    every = {
        signature(problem, each): period(profile, cluster, each, in_flight, recompute)
        for each in divisions(len(profile.layers), cluster.slots, ordered)
        if stages in (None, len(each)) and has_room(problem, each, in_flight)
    }
    room = problem.room(in_flight)
    found = problem.divider.least(in_flight, room)
    if not found:
        assert not every
        return
    best = min(every.values())
    assert found[0].period(in_flight) == pytest.approx(every[problem.costs.alike(found[0].kinds), found[0].splits])
    assert found[0].period(in_flight) <= best * CLOSE + 1e-9
    assert [each.period(in_flight) for each in found] == sorted(each.period(in_flight) for each in found)
    limit = best * 1.25 + 0.1
    within = [*problem.divider.within(limit, in_flight, room)]
    assert len({*within}) == len(within)
    assert {(problem.costs.alike(each.kinds), each.splits) for each in within} == {
        place for place, each in every.items() if each <= limit * (1 + 1e-9)
    }


@explores(60)
@given(profile=profiles(), cluster=clusters(), ordered=st.booleans(), most=st.integers(0, 12))
def test_where_there_are_too_many_orders_it_is_one_of_all(
    profile: Profile, cluster: Cluster, ordered: bool, most: int
) -> None:
    """It may be slower than the best, and says so."""
    problem, exact = (PlanningProblem(profile, cluster, optimizer=2.0, ordered=ordered) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divider, "MOST_ROWS", most)
        assert problem.divider.exact <= (ordered or most >= 2)
        found = least(problem)
    best = least(exact)
    assert (best is None) >= (found is None) if ordered else True
    if found is not None:
        assert best is not None
        assert best.bottleneck <= found.bottleneck * CLOSE
        assert all(found.kinds.count(kind) <= len(each.slots) for kind, each in enumerate(problem.costs.kinds))
        assert list(found.splits) == sorted({0, *found.splits})


def with_devices(cluster: Cluster, devices: Sequence[Device]) -> Cluster:
    left = iter(devices)
    return Cluster([Node(n.name, [next(left) for _ in n.devices], n.link) for n in cluster.nodes], cluster.link)


def at_most(one: Cluster, other: Cluster, profile: Profile) -> bool:
    """True if ``profile`` takes no more on ``one`` than on ``other``, or does not fit there either."""
    found = [least(PlanningProblem(profile, cluster, optimizer=0)) for cluster in (one, other)]
    return found[1] is None or (found[0] is not None and found[0].bottleneck <= found[1].bottleneck * CLOSE)


@explores(60)
@given(profile=profiles(), cluster=clusters(), number=st.integers(0, 3), factor=st.sampled_from([2.0, 4.0]))
def test_a_faster_device_never_makes_it_worse(profile: Profile, cluster: Cluster, number: int, factor: float) -> None:
    devices = [slot.device for slot in cluster.slots]
    place = number % len(devices)
    quick = replace(devices[place], speed=factor)
    assert at_most(with_devices(cluster, [*devices[:place], quick, *devices[place + 1 :]]), cluster, profile)


@explores(60)
@given(profile=profiles(), cluster=clusters(), number=st.integers(0, 3), more=st.one_of(st.none(), st.integers(0, 99)))
def test_more_memory_never_makes_it_worse(profile: Profile, cluster: Cluster, number: int, more: int | None) -> None:
    devices = [slot.device for slot in cluster.slots]
    place = number % len(devices)
    memory = devices[place].memory
    large = replace(devices[place], memory=None if more is None or memory is None else memory + more)
    assert at_most(with_devices(cluster, [*devices[:place], large, *devices[place + 1 :]]), cluster, profile)


@explores(60)
@given(profile=profiles(), cluster=clusters(), name=st.sampled_from(NAMES))
def test_another_device_never_makes_it_worse(profile: Profile, cluster: Cluster, name: str) -> None:
    *others, last = cluster.nodes
    larger = Cluster([*others, Node(last.name, [*last.devices, Device(name)], last.link)], cluster.link)
    assert at_most(larger, cluster, profile)


@explores(60)
@given(profile=profiles(), cluster=clusters(), scale=st.sampled_from([0.125, 2.0, 1024.0]))
def test_what_takes_longer_takes_longer_by_as_much(profile: Profile, cluster: Cluster, scale: float) -> None:
    times = {name: [each.divided(1 / scale) for each in own] for name, own in profile.times.items()}
    links = [
        Link(link.bandwidth / scale, link.latency * scale)
        for link in (cluster.link or NO_LINK, *(n.own_link for n in cluster.nodes))
    ]
    slow = Cluster([Node(n.name, n.devices, link) for n, link in zip(cluster.nodes, links[1:], strict=True)], links[0])
    one = least(PlanningProblem(profile, cluster, optimizer=0))
    other = least(PlanningProblem(replace(profile, times=times), slow, optimizer=0))
    assert (one is None) == (other is None)
    assert one is None or other is None or other.bottleneck == pytest.approx(one.bottleneck * scale, rel=CLOSE - 1)


@explores(60)
@given(profile=profiles(6), cluster=clusters(), in_flight=st.integers(2, 6))
def test_stages_hold_what_is_said_at_the_least(profile: Profile, cluster: Cluster, in_flight: int) -> None:
    """Else plans that fit would be passed over."""
    problem = PlanningProblem(profile, cluster, optimizer=2.0)
    room = problem.room(in_flight, share=math.inf)
    for division in [*problem.divider.least(in_flight, room), *problem.divider.within(99.0, in_flight, room)][:40]:
        look = problem.estimate(problem.costs.slots(division.kinds), division.splits, in_flight)
        assert look is not None
        assert look.fits <= (not problem.surely_lacks(division, in_flight))
        for index in range(len(look.stages)):
            held = look.simulation.heaviest(index)
            for load in least_loads(in_flight, index, len(look.stages)):
                assert any(load.held <= one.held and load.waiting <= one.waiting for one in held)


def test_a_device_that_only_costs_is_left_out() -> None:
    """The transfer over the link takes longer than the work that it takes away."""
    layers = [LayerBytes("a", 1, 100, 100), LayerBytes("b", 1, 100, 0)]
    profile = Profile("two layers", 1, layers, {"gpu": [Times(1.0, 1.0), Times(1.0, 1.0)]}, {})
    for bandwidth, stages in ((10.0, 1), (100.0, 2)):
        cluster = Cluster([Node("box", ["gpu", "gpu"], Link(bandwidth))])
        found = least(PlanningProblem(profile, cluster, optimizer=0))
        assert found is not None
        assert len(found.splits) == stages


def test_sixteen_devices_of_four_types_and_a_thousand_layers() -> None:
    """Some of so many boundaries are looked at, and then those near the best ones."""
    layers = [LayerBytes(str(n), 1 << 20, 4 << 20, 1 << 18) for n in range(1000)]
    names = ("a", "b", "c", "d")
    times = {n: [Times(0.001 * (i + 1), 0.002 * (i + 1))] * 1000 for i, n in enumerate(names)}
    profile = Profile("deep", 1, layers, times, {})
    cluster = Cluster([Node("rack", [f"4x{name}" for name in names], Link(1e10))])
    problem = PlanningProblem(profile, cluster, optimizer=0)
    found = least(problem)
    assert found is not None
    assert problem.divider.exact
    # Without links, devices of speeds 1, 1/2, 1/3 and 1/4 would take 3.0 s over 4 (1 + 1/2 + 1/3 + 1/4).
    assert 0.36 <= found.bottleneck <= 0.37
    assert len(found.kinds) == 16
