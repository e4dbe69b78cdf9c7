"""Plans with a small Nm, which memory asks for, are as fast as any that fits: checked against all of them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.planning.model.cluster import Cluster, Device, Link, Node
from lightning_hetpipe.planning.model.costs import Costs, kinds_of
from lightning_hetpipe.planning.model.estimate import estimate
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.divider import LIGHTEST, Divider
from lightning_hetpipe.planning.search.local_search import LocalSearch
from lightning_hetpipe.planning.search.problem import PlanningProblem
from tests.planning.instances import bottleneck, clusters, divisions, has_room, profiles
from tests.support.marks import explores


def tight(seed: int) -> tuple[Profile, Cluster]:
    """Six layers on three devices that have little memory, over slow links."""
    draw = random.Random(seed)
    layers = []
    for number in range(6):
        output = draw.randint(1, 20)
        layers.append(LayerBytes(str(number), draw.randint(0, 20), output + draw.randint(0, 80), output))
    each = [Times(draw.uniform(0.5, 3), draw.uniform(1, 6), 0.05) for _ in layers]
    times = {name: [time.divided(speed) for time in each] for name, speed in (("a", 1.0), ("b", 0.6), ("c", 0.4))}
    share = (1.3 * sum(layer.kept for layer in layers) + 5 * sum(layer.parameters for layer in layers)) / 3
    devices = [Device(draw.choice("abc"), int(draw.uniform(0.8, 3) * share)) for _ in range(3)]
    return Profile("tight", 1, layers, times, {}), Cluster([Node("box", devices, Link(draw.choice([5.0, 20.0])))])


@pytest.mark.parametrize("seed", [3, 8])
def test_no_plan_that_fits_is_faster_by_two_percent(seed: int) -> None:
    profile, cluster = tight(seed)
    found = best_plan(profile, cluster, optimizer=2.0)
    best = 0.0
    for stages in divisions(len(profile.layers), cluster.slots, ordered=False):
        slots, splits = [slot for slot, *_ in stages], [first for _, first, _ in stages]
        for in_flight in range(1, 8):
            look = estimate(profile, cluster, slots, splits, in_flight, state=2.0)
            if not look.fits:
                break
            best = max(best, look.rate)
    assert found.fits == bool(best)
    assert found.rate >= 0.98 * best


def test_one_device_may_be_faster_than_two_where_memory_allows_one_in_flight_only() -> None:
    """Two devices share the work best at three layers to one, but with one minibatch in flight one only ever waits."""
    layers = [LayerBytes(str(number), 10, 20, 0) for number in range(4)]
    profile = Profile("four", 1, layers, {"gpu": [Times(1.0, 2.0)] * 4}, {})
    cluster = Cluster([Node("box", [Device("gpu", 220), Device("gpu", 90, speed=1 / 3)])])
    found = best_plan(profile, cluster, optimizer="sgd")
    assert (found.in_flight, [stage.slot.number for stage in found.stages]) == (1, [0])
    assert found.rate == pytest.approx(1 / 12)
    assert [(each.in_flight, each.rate is None) for each in found.tried] == [(1, False), (2, True)]


def test_a_plan_is_found_that_holds_less_than_the_stages_that_were_seen_before() -> None:
    """The last of two stages holds more gradients than the first of one: the bound of the former hid the latter."""
    sizes = [LayerBytes("0", 2, 3, 0), LayerBytes("1", 1, 3, 0), LayerBytes("2", 0, 4, 0)]
    times = [Times(4.0, 5.0), Times(2.0, 2.0), Times(1.0, 3.0)]
    profile = Profile("three", 1, sizes, {"gpu": times}, {})
    cluster = Cluster([Node("box", [Device("gpu", 18, speed=2), Device("gpu", 37)])])
    found = best_plan(profile, cluster, optimizer="sgd", in_flight=4)
    assert found.fits
    assert [stage.slot.number for stage in found.stages] == [1]


@explores(40)
@given(profile=profiles(5), cluster=clusters(3), ordered=st.booleans(), given_=st.booleans(), data=st.data())
def test_changes_are_divisions(
    profile: Profile, cluster: Cluster, ordered: bool, given_: bool, data: st.DataObject
) -> None:
    """And of as many stages, where that is given."""
    costs = Costs(profile, cluster, kinds_of(cluster, cluster.slots, apart=ordered))
    every = {
        (tuple(next(n for n, kind in enumerate(costs.kinds) if slot in kind.slots) for slot, *_ in stages), splits)
        for stages in divisions(len(profile.layers), cluster.slots, ordered)
        for splits in [tuple(first for _, first, _ in stages)]
    }
    place = data.draw(st.sampled_from(sorted(every)))
    stages = len(place[0]) if given_ else None
    problem = PlanningProblem(profile, cluster, cluster.slots, ordered, stages=stages)
    assert {*LocalSearch(problem, costs, 2)._changes(*place)} <= {
        each for each in every if stages in (None, len(each[0]))
    }


@explores(40)
@given(profile=profiles(5), cluster=clusters(3), ordered=st.booleans(), stages=st.sampled_from([None, 1, 2]))
def test_each_order_has_its_best_cuts(profile: Profile, cluster: Cluster, ordered: bool, stages: int | None) -> None:
    stages = None if stages is None else min(stages, len(profile.layers), len(cluster.slots))
    dividing = Divider(PlanningProblem(profile, cluster, cluster.slots, ordered=ordered, stages=stages))
    found = list(dividing.in_each_order(2, (LIGHTEST,)))
    least: dict[tuple[object, ...], float] = {}
    kinds = {slot: n for n, kind in enumerate(dividing.costs.kinds) for slot in kind.slots}
    for each in divisions(len(profile.layers), cluster.slots, ordered):
        if stages in (None, len(each)) and has_room(profile, each, 2, 0.0, False, (LIGHTEST,)):
            order = tuple(kinds[slot] for slot, *_ in each)
            least[order] = min(least.get(order, float("inf")), bottleneck(profile, cluster, each))
    assert {tuple(kinds[slot] for slot in one.slots): one.bottleneck for one in found} == least
    for one in found:
        assert all(split < later for split, later in pairwise(one.splits))
