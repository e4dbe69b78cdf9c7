"""The division of layers among unequal devices is the best there is: checked against every split and every order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.planning.model.cluster import NO_LINK, Cluster, Device, Link, Node
from lightning_hetpipe.planning.model.costs import kinds_of
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.model.simulate import StageLoad
from lightning_hetpipe.planning.search import device_order
from lightning_hetpipe.planning.search.divider import Divider, Division
from lightning_hetpipe.planning.search.problem import PlanningProblem
from tests.planning.instances import NAMES, Stages, bottleneck, clusters, divisions, has_room, profiles
from tests.support.marks import explores


def stages_of(division: Division, layers: int) -> Stages:
    return tuple(zip(division.slots, division.splits, [*division.splits[1:], layers], strict=True))


LOADS = [[StageLoad(1, 1)], [StageLoad(2, 1), StageLoad(1, 2, 0)]]


def with_devices(cluster: Cluster, devices: Sequence[Device]) -> Cluster:
    left = iter(devices)
    return Cluster([Node(n.name, [next(left) for _ in n.devices], n.link) for n in cluster.nodes], cluster.link)


def at_most(one: Cluster, other: Cluster, profile: Profile) -> bool:
    """True if ``profile`` takes no more on ``one`` than on ``other``, or does not fit there either."""
    found = [Divider(PlanningProblem(profile, cluster, cluster.slots)).divide(2, LOADS) for cluster in (one, other)]
    return found[1] is None or (found[0] is not None and found[0].bottleneck <= found[1].bottleneck)


def together(nodes: Sequence[int], cluster: Cluster) -> bool:
    """True if those of a node are neighbours, or nodes do not matter, as all links are the same."""
    alike = len({kind.group for kind in kinds_of(cluster, cluster.slots)}) == 1
    return alike or len([*groupby(nodes)]) == len(set(nodes))


class NoOtherOrders(Divider):
    """As if there were too many orders to look through all."""

    RULES = Divider.RULES[1:]


a_load = st.builds(StageLoad, st.integers(1, 4), st.integers(0, 4), st.integers(0, 1))
some_loads = st.lists(st.lists(a_load, min_size=1, max_size=3), min_size=1, max_size=4)


@explores(150)
@given(
    profile=profiles(),
    cluster=clusters(),
    ordered=st.booleans(),
    in_flight=st.integers(1, 4),
    state=st.sampled_from([0.0, 1.0, 2.5]),
    recompute=st.booleans(),
    loads=some_loads,
)
def test_it_is_the_best_of_all(
    profile: Profile,
    cluster: Cluster,
    ordered: bool,
    in_flight: int,
    state: float,
    recompute: bool,
    loads: list[list[StageLoad]],
) -> None:
    layers = len(profile.layers)
    every = [
        each
        for each in divisions(layers, cluster.slots, ordered)
        if has_room(profile, each, in_flight, state, recompute, loads)
    ]
    dividing = Divider(
        PlanningProblem(profile, cluster, cluster.slots, ordered=ordered, state=state, recompute=recompute)
    )
    found = dividing.divide(in_flight, loads)
    if found is None:
        assert not every
        return
    stages = stages_of(found, layers)
    assert stages in every
    assert found.bottleneck == bottleneck(profile, cluster, stages, recompute), "it is what it says"
    assert found.bottleneck == min(bottleneck(profile, cluster, each, recompute) for each in every), "exactly"


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
@given(profile=profiles(), cluster=clusters(), ordered=st.booleans())
def test_free_to_choose_the_order_it_is_no_worse(profile: Profile, cluster: Cluster, ordered: bool) -> None:
    free, given = (
        Divider(PlanningProblem(profile, cluster, cluster.slots, ordered=each)).divide(loads=LOADS)
        for each in (False, True)
    )
    assert given is None or (free is not None and free.bottleneck <= given.bottleneck)


@explores(60)
@given(profile=profiles(), cluster=clusters(), scale=st.sampled_from([0.125, 2.0, 1024.0]))
def test_what_takes_longer_takes_longer_by_as_much(profile: Profile, cluster: Cluster, scale: float) -> None:
    times = {name: [each.divided(1 / scale) for each in own] for name, own in profile.times.items()}
    links = [
        Link(link.bandwidth / scale, link.latency * scale)
        for link in (cluster.link or NO_LINK, *(n.own_link for n in cluster.nodes))
    ]
    slow = Cluster([Node(n.name, n.devices, link) for n, link in zip(cluster.nodes, links[1:], strict=True)], links[0])
    one = Divider(PlanningProblem(profile, cluster, cluster.slots)).divide(loads=LOADS)
    other = Divider(PlanningProblem(replace(profile, times=times), slow, slow.slots)).divide(loads=LOADS)
    assert (one is None) == (other is None)
    assert one is None or other is None or other.bottleneck == one.bottleneck * scale


@explores(60)
@given(profile=profiles(5), cluster=clusters(), data=st.data())
def test_where_there_are_too_many_orders_those_of_a_node_stay_together(
    profile: Profile, cluster: Cluster, data: st.DataObject
) -> None:
    found = NoOtherOrders(PlanningProblem(profile, cluster, cluster.slots)).divide(loads=LOADS)
    every = [
        each
        for each in divisions(len(profile.layers), cluster.slots, ordered=False)
        if has_room(profile, each, 1, 0.0, False, LOADS) and together([slot.node for slot, *_ in each], cluster)
    ]
    assert (found is None) == (not every)
    if found is not None:
        assert found.bottleneck == min(bottleneck(profile, cluster, each) for each in every)


def test_it_says_when_it_has_not_seen_all_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"kind {number}" for number in range(6)]
    layers = [LayerBytes(str(number), 1, 1, 0) for number in range(12)]
    times = {name: [Times(1.0 + number, 2.0)] * 12 for number, name in enumerate(names)}
    profile = Profile("many kinds", 1, layers, times, {})
    cluster = Cluster([Node("slow first", list(reversed(names)))])
    exact, given = (
        Divider(PlanningProblem(profile, cluster, cluster.slots, ordered=ordered)) for ordered in (False, True)
    )
    best, ordered = exact.divide(), given.divide()
    assert exact.exact
    assert given.exact
    assert best is not None
    assert ordered is not None
    monkeypatch.setattr(device_order, "MOST", 13 * 25)
    short = Divider(PlanningProblem(profile, cluster, cluster.slots))
    assert short.divide() == ordered
    assert not short.exact
    assert best.bottleneck <= ordered.bottleneck


def test_a_device_that_only_costs_is_left_out() -> None:
    """The transfer over the link takes longer than the work that it takes away."""
    layers = [LayerBytes("a", 1, 100, 100), LayerBytes("b", 1, 100, 0)]
    profile = Profile("two layers", 1, layers, {"gpu": [Times(1.0, 1.0), Times(1.0, 1.0)]}, {})
    devices = ["gpu", "gpu"]
    for bandwidth, stages in ((10.0, 1), (100.0, 2)):
        cluster = Cluster([Node("box", devices, Link(bandwidth))])
        found = Divider(PlanningProblem(profile, cluster, cluster.slots)).divide()
        assert found is not None
        assert len(found.splits) == stages


def test_sixteen_devices_of_four_types_and_a_thousand_layers() -> None:
    """All of it is divided, over all orders; how long that takes is a benchmark's affair."""
    layers = [LayerBytes(str(n), 1 << 20, 4 << 20, 1 << 18) for n in range(1000)]
    names = ("a", "b", "c", "d")
    times = {n: [Times(0.001 * (i + 1), 0.002 * (i + 1))] * 1000 for i, n in enumerate(names)}
    profile = Profile("deep", 1, layers, times, {})
    cluster = Cluster([Node("rack", [f"4x{name}" for name in names], Link(1e10))])
    dividing = Divider(PlanningProblem(profile, cluster, cluster.slots))
    found = dividing.divide()
    assert found is not None
    assert dividing.exact
    # Without links, devices of speeds 1, 1/2, 1/3 and 1/4 would take 3.0 s over 4 (1 + 1/2 + 1/3 + 1/4).
    assert 0.36 <= found.bottleneck <= 0.37
    assert len(set(found.slots)) == 16
