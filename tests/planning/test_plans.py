"""Plans are as fast as any that fits, and more devices never make them slower: checked against all plans there are."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning_problems import neo, rack, transformer
from lightning_hetpipe.planning.model.cluster import Cluster, Device, Link, Node
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.search import plans
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.plans import PlansAt
from lightning_hetpipe.planning.search.problem import PlanningProblem
from tests.planning.instances import divisions, takes
from tests.support.marks import explores

STATE = 2.0


@st.composite
def instances(draw: st.DrawFn, most_devices: int, most_layers: int) -> tuple[Profile, Cluster]:
    """Devices of a few kinds on up to three nodes, over links of all speeds, with much memory or little."""
    seeded = random.Random(draw(st.integers(0, 1 << 30)))
    count, devices = draw(st.integers(2, most_layers)), draw(st.integers(2, most_devices))
    alike, whole = seeded.random() < 0.4, seeded.random() < 0.3
    layers, times = [], []
    for number in range(count):
        output = 10_000 if alike else 1_000 * seeded.randint(1, 20)
        weights = 1_000 * (10 if alike else seeded.randint(0, 20))
        layers.append(LayerBytes(str(number), weights, output + 1_000 * seeded.randint(0, 0 if alike else 80), output))
        drawn = (
            (seeded.randint(1, 4), seeded.randint(1, 8)) if whole else (seeded.uniform(0.5, 3), seeded.uniform(1, 6))
        )
        forward, backward = (1.0, 2.0) if alike else drawn
        times.append(Times(forward, backward, seeded.choice([0.0, 0.05])))
    speeds = {"a": 1.0, "b": seeded.choice([0.5, 0.6]), "c": seeded.choice([0.2, 0.4])}
    share = (1.3 * sum(each.kept for each in layers) + 5 * sum(each.parameters for each in layers)) / devices
    most = draw(st.sampled_from([None, 3.0, 6.0]))
    kinds = [
        Device(seeded.choice("abc"), None if most is None else int(seeded.uniform(0.6, most) * share) + 1)
        for _ in range(seeded.randint(1, 4))
    ]
    chosen = [seeded.choice(kinds) for _ in range(devices)]
    ends = sorted(seeded.sample(range(1, devices), min(devices - 1, seeded.randint(0, 2))))
    links = [Link(10_000 / seeded.choice([0.01, 0.3, 1.0, 3.0]), seeded.choice([0.0, 0.05])) for _ in range(4)]
    nodes = [
        Node(f"node {start}", chosen[start:end], link)
        for start, end, link in zip([0, *ends], [*ends, devices], links[1:], strict=False)
    ]
    by_name = {name: [each.divided(speed) for each in times] for name, speed in speeds.items()}
    return Profile("random", 1, layers, by_name, {}), Cluster(nodes, links[0])


def best_of_all(profile: Profile, cluster: Cluster, in_flight: int, above: float) -> float:
    """Minibatches per second of the fastest plan that fits, if that is more than 1% ``above``."""
    every = []
    for stages in divisions(len(profile.layers), cluster.slots, ordered=False):
        own = takes(profile, cluster, stages)
        every.append((max(max(own), sum(own) / in_flight), stages))
    best = above
    for period, stages in sorted(every, key=lambda each: each[0]):
        if best * period >= 1 / 1.01:
            break  # none of the others is faster
        slots, splits = [slot for slot, *_ in stages], [first for _, first, _ in stages]
        look = PlanningProblem(profile, cluster, optimizer=STATE).estimate(slots, splits, in_flight)
        best = max(best, look.rate if look.fits else 0.0)
    return best


def rate(found: Estimate) -> float:
    return found.rate if found.fits else 0.0


@explores(30)
@given(instance=instances(4, 6), in_flight=st.integers(1, 8))
def test_no_plan_that_fits_is_faster_by_more_than_a_hundredth(
    instance: tuple[Profile, Cluster], in_flight: int
) -> None:
    found = rate(best_plan(PlanningProblem(*instance, optimizer=STATE), in_flight))
    assert found >= 0.99 * best_of_all(*instance, in_flight, found)


@pytest.mark.slow
@explores(60)
@given(instance=instances(5, 7), in_flight=st.integers(1, 9))
def test_no_plan_on_five_devices_is_faster(instance: tuple[Profile, Cluster], in_flight: int) -> None:
    found = rate(best_plan(PlanningProblem(*instance, optimizer=STATE), in_flight))
    assert found >= 0.99 * best_of_all(*instance, in_flight, found)


@explores(24)
@given(instance=instances(8, 9), data=st.data())
def test_another_device_never_makes_plans_slower(instance: tuple[Profile, Cluster], data: st.DataObject) -> None:
    """It is left out where it does not help, and named."""
    profile, cluster = instance
    found = best_plan(PlanningProblem(profile, cluster, optimizer=STATE))
    gone = data.draw(st.sampled_from(cluster.slots))
    fewer = best_plan(
        PlanningProblem(profile, cluster, [slot for slot in cluster.slots if slot != gone], optimizer=STATE)
    )
    assert rate(found) >= 0.99 * rate(fewer)
    assert {*found.idle} == {*cluster.slots} - {stage.slot for stage in found.stages}


@explores(15)
@given(instance=instances(8, 8), in_flight=st.integers(1, 10), data=st.data())
def test_sampled_plans_of_eight_devices_are_no_faster(
    instance: tuple[Profile, Cluster], in_flight: int, data: st.DataObject
) -> None:
    profile, cluster = instance
    found = rate(best_plan(PlanningProblem(profile, cluster, optimizer=STATE), in_flight))
    seeded = random.Random(data.draw(st.integers(0, 1 << 30)))
    for _ in range(60):
        count = seeded.randint(1, min(len(cluster.slots), len(profile.layers)))
        splits = (0, *sorted(seeded.sample(range(1, len(profile.layers)), count - 1)))
        look = PlanningProblem(profile, cluster, optimizer=STATE).estimate(
            seeded.sample(cluster.slots, count), splits, in_flight
        )
        assert not look.fits or found >= 0.99 * look.rate


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param(5.0, marks=pytest.mark.slow)])
def test_a_large_model_on_few_unequal_devices(optimizer: str | float) -> None:
    """With a number of stages given, plans were faster than without: a small T_max is not all that counts."""
    profile, cluster = neo(bytes_=2)
    found = best_plan(PlanningProblem(profile, cluster, optimizer=optimizer))
    given_ = [
        best_plan(PlanningProblem(profile, cluster, optimizer=optimizer, stages=stages)) for stages in (1, 2, 3, 4)
    ]
    assert found.fits
    assert found.rate >= 0.99 * max(map(rate, given_))


@pytest.mark.parametrize("nodes", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_on_many_nodes_leaving_one_device_out_never_helps(nodes: int) -> None:
    """Nodes of one type are interchangeable, and so are their devices."""
    profile, cluster = transformer(24), rack(nodes, 8)
    found = best_plan(PlanningProblem(profile, cluster, optimizer=STATE))
    for gone in [cluster.nodes[number].devices[0] for number in range(4 if nodes > 4 else 1)]:
        slot = next(slot for slot in cluster.slots if slot.device == gone)
        fewer = best_plan(
            PlanningProblem(profile, cluster, [each for each in cluster.slots if each != slot], optimizer=STATE)
        )
        assert rate(fewer) <= 1.01 * rate(found)


def test_with_too_many_orders_and_little_effort_plans_are_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "GLIMPSE", 0)
    monkeypatch.setattr(PlansAt.best, "__defaults__", (0.0, 0))
    profile, cluster = transformer(6), rack(2, 2)
    found = best_plan(PlanningProblem(profile, cluster, optimizer=STATE), 3)
    assert found.fits
