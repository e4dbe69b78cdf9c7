"""Plans with groups of devices, next to every way to join, count and divide."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.planning.model.cluster import Cluster, Device, DeviceSlot, Link, Node
from lightning_hetpipe.planning.model.divided_stage import MEMBER_CALL
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.model.profile import LayerBytes, LayerWidths, Profile, Times
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.grouped_plans import WORTH, plan_with_groups
from lightning_hetpipe.planning.search.plans import ENOUGH
from lightning_hetpipe.planning.search.problem import PlanningProblem
from tests.planning.instances import divisions
from tests.planning.test_group_times import every

MANY = 12
"""Minibatches in flight at which few devices are as fast as the slowest stage."""


@st.composite
def problems(draw: st.DrawFn) -> tuple[Profile, Cluster]:
    count = draw(st.integers(1, 4))
    layers = [LayerBytes(f"layer {n}", 1, 1, draw(st.integers(0, 3)), draw(st.integers(1, 3))) for n in range(count)]
    times = {name: [Times(*[draw(st.integers(1, 9)) / 2] * 2) for _ in range(count)] for name in ("fast", "slow")}
    # Each run is of one layer: stages that part a run are only estimated.
    widths = {n: LayerWidths(n, {f"layer {n}": draw(st.integers(1, 4))}) for n in range(count) if draw(st.booleans())}
    devices = draw(st.lists(st.sampled_from(["fast", "slow"]), min_size=1, max_size=3))
    link = st.sampled_from([math.inf, 8.0, 1.0])
    here = draw(st.integers(1, len(devices)))
    nodes = [Node("one", devices[:here], Link(draw(link)))]
    if devices[here:]:
        nodes.append(Node("two", devices[here:], Link(draw(link))))
    return Profile("small", 1, layers, times, {}, widths=widths), Cluster(nodes, Link(math.inf))


def parts_of(slots: Sequence[DeviceSlot]) -> Iterator[list[list[DeviceSlot]]]:
    """Every way to put ``slots`` into parts of one node."""
    if not slots:
        yield []
        return
    for parts in parts_of(slots[1:]):
        yield [[slots[0]], *parts]
        for number, part in enumerate(parts):
            if part[0].node == slots[0].node:
                yield [*parts[:number], [slots[0], *part], *parts[number + 1 :]]


def units_of(widths: LayerWidths) -> int:
    (units,) = widths.units.values()
    return units


def seconds(profile: Profile, box: Cluster, part: Sequence[DeviceSlot], layer: int) -> float:
    """The least that the layer takes on the group, whichever device is the first, in whichever counts."""
    times = [sum(profile.times_on(slot.device)[layer][:2]) for slot in part]
    found = [*times] if len(part) == 1 else [min(times)]
    widths = profile.widths.get(layer)
    for counts in every(units_of(widths), len(part)) if widths and len(part) > 1 else ():
        assert widths is not None
        calls = 2 * len(part) * MEMBER_CALL
        for main in part:
            links = [box.link_between(main, slot) for slot in part]
            came, goes = profile.layers[layer].given, profile.layers[layer].output
            parts = [count / units_of(widths) for count in counts]
            found.append(
                calls
                + max(
                    own * each + (2 * (link.seconds(came) + (goes + 1) * each / link.bandwidth) if each else 0.0)
                    for own, each, link in zip(times, parts, links, strict=True)
                )
            )
    return min(found)


def bottleneck(profile: Profile, box: Cluster) -> float:
    """The least T_max of all."""
    best = math.inf
    for parts in parts_of(box.slots):
        heads = {part[0]: part for part in parts}
        for stages in divisions(len(profile.layers), [*heads], False):
            takes = []
            for number, (slot, first, after) in enumerate(stages):
                own = sum(seconds(profile, box, heads[slot], layer) for layer in range(first, after))
                before = 2 * profile.crossing(box.link_between(stages[number - 1][0], slot), first) if number else 0.0
                takes.append(own + before)
            best = min(best, max(takes))
    return best


@given(problems())
def test_no_plan_is_faster(drawn: tuple[Profile, Cluster]) -> None:
    profile, box = drawn
    found = plan_with_groups(PlanningProblem(profile, box, optimizer="sgd"), MANY)
    # In the first device's place a plan has the fastest; another one can be better where links are slow.
    slack = 1.0 if all(node.own_link.bandwidth == math.inf for node in box.nodes) else 1.5
    assert found.bottleneck <= bottleneck(profile, box) * WORTH / ENOUGH * slack * (1 + 1e-9)
    assert found.rate >= best_plan(PlanningProblem(profile, box, optimizer="sgd"), MANY).rate


def wide(*speeds: float, memory: Sequence[int | None] = (None,) * 9, output: int = 1 << 20) -> tuple[Profile, Cluster]:
    """Two wide layers, each followed by an activation, before a narrow one."""
    layers = [LayerBytes(name, 1 << 20, output, output) for name in ("wide", "relu", "wider", "relu2", "head")]
    times = [Times(0.1, 0.2), Times(0.01, 0.01), Times(0.2, 0.4), Times(0.01, 0.01), Times(0.001, 0.001)]
    widths = {
        0: LayerWidths(0, {"net.wide": 64}),
        1: LayerWidths(0),
        2: LayerWidths(2, {"net.wider": 64}),
        3: LayerWidths(2),
    }
    devices = [Device("gpu", each, speed) for speed, each in zip(speeds, memory, strict=False)]
    return Profile("wide", 1, layers, {"gpu": times}, {}, widths=widths), Cluster(
        [Node("box", devices, Link("12 GB/s"))]
    )


def divided(found: Estimate) -> dict[str, tuple[int, ...]]:
    return {name: counts for stage in found.stages if stage.divided for name, counts in stage.divided.counts.items()}


def test_devices_are_joined_where_no_cut_balances_them() -> None:
    profile, box = wide(1.0, 2.0, 4.0)
    found, plain = plan_with_groups(PlanningProblem(profile, box)), best_plan(PlanningProblem(profile, box))
    total = sum(each.forward + each.backward for each in profile.times["gpu"])
    assert found.rate > 0.95 * 7 / total > 1.05 * plain.rate
    assert set(divided(found)) == {"net.wide", "net.wider"}


def test_devices_stay_apart_where_stages_are_balanced() -> None:
    layers = [LayerBytes(f"layer {n}", 1, 1, 1) for n in range(6)]
    widths = {n: LayerWidths(n, {f"layer {n}": 8}) for n in range(6)}
    profile = Profile("even", 1, layers, {"gpu": [Times(0.1, 0.2)] * 6}, {}, widths=widths)
    box = Cluster([Node("box", ["2xgpu"], Link("12 GB/s"))])
    found = plan_with_groups(PlanningProblem(profile, box))
    assert not divided(found)
    assert found == best_plan(PlanningProblem(profile, box))


def test_slow_links_keep_devices_apart() -> None:
    profile, box = wide(1.0, 1.0)
    slow = Cluster([Node("box", box.nodes[0].devices, Link("0.2 MB/s"))])
    assert divided(plan_with_groups(PlanningProblem(profile, box)))
    assert plan_with_groups(PlanningProblem(profile, slow)) == best_plan(PlanningProblem(profile, slow))


def test_groups_lie_within_a_node() -> None:
    profile, box = wide(1.0, 1.0)
    apart = Cluster([Node(name, [device]) for name, device in zip("ab", box.nodes[0].devices, strict=True)], "1 TB/s")
    assert not divided(plan_with_groups(PlanningProblem(profile, apart)))


def test_many_devices_are_joined() -> None:
    profile, box = wide(*[1.0] * 9)
    found = plan_with_groups(PlanningProblem(profile, box), 4)
    assert found.rate > 1.5 * best_plan(PlanningProblem(profile, box), 4).rate


def test_a_member_has_no_more_than_its_memory() -> None:
    """The second device has room for activations and a part of the weights."""
    profile, box = wide(1.0, 1.0, memory=[None, 5 << 19])
    found = plan_with_groups(PlanningProblem(profile, box), 1)
    whole = plan_with_groups(PlanningProblem(*wide(1.0, 1.0)), 1)
    assert divided(whole) == {"net.wide": (32, 32), "net.wider": (32, 32)}
    (stage,) = found.stages
    assert stage.divided is not None
    assert stage.divided.taken[1] <= (box.slots[1].device.memory or 0)
    assert all(0 < second < first for first, second in divided(found).values())


def test_one_stage_for_each_group_that_is_asked_for() -> None:
    profile, box = wide(1.0, 1.0)
    assert len(plan_with_groups(PlanningProblem(profile, box, stages=2)).stages) == 2
    assert len(plan_with_groups(PlanningProblem(profile, box, stages=1)).stages) == 1


def test_the_plan_names_members_and_counts() -> None:
    profile, box = wide(1.0, 3.0, memory=["3 GiB", "2 GiB"])  # type: ignore[list-item]
    found = plan_with_groups(PlanningProblem(replace(profile, estimated={"gpu": "gpu"}), box))
    plan = Plan.of(found, profile.model, [layer.name for layer in profile.layers], box, ["gpu"])
    assert not [*plan.problems(box)]
    (stage,) = plan.virtual_workers[0].stages
    assert [member.device for member in stage.group] == ["gpu:0 (estimated)", "gpu:1 (estimated)"]
    assert [member.share for member in stage.group] == pytest.approx([0.25, 0.75], abs=0.01)
    assert [(split.layer, split.counts) for split in stage.splits] == [("net.wide", (16, 48)), ("net.wider", (16, 48))]


def test_stages_that_part_a_run_have_its_rows_whole() -> None:
    """Rows have no parts of their input to sum up in a stage of their own."""
    layers = [LayerBytes(name, 1, 1, 1) for name in ("columns", "rows")]
    widths = {0: LayerWidths(0, {"net.columns": 64}), 1: LayerWidths(0, sums=True)}
    profile = Profile("mlp", 1, layers, {"gpu": [Times(0.1, 0.2), Times(1.0, 2.0)]}, {}, widths=widths)
    box = Cluster([Node("box", ["3xgpu"], Link("1 TB/s"))])
    together = plan_with_groups(PlanningProblem(profile, box), 4)
    assert divided(together)
    assert together.rate == pytest.approx(3 / 3.3, rel=0.1)
    assert plan_with_groups(PlanningProblem(profile, box, stages=2), 4) == best_plan(
        PlanningProblem(profile, box, stages=2), 4
    )


def test_a_stage_begins_behind_a_run_that_it_would_part() -> None:
    """A plan had the rows in a stage of their own, where they could not be divided, and was left for that."""
    layers = [LayerBytes(name, 1, 1, 1) for name in ("columns", "rows", "head")]
    widths = {0: LayerWidths(0, {"net.columns": 64}), 1: LayerWidths(0, sums=True)}
    times = [Times(0.01, 0.02), Times(1.0, 2.0), Times(0.01, 0.01)]
    profile = Profile("mlp", 1, layers, {"gpu": times}, {}, widths=widths)
    box = Cluster([Node("box", ["3xgpu"], Link("1 TB/s"))])
    found = plan_with_groups(PlanningProblem(profile, box, stages=2))
    assert found.rate > 1.9 * best_plan(PlanningProblem(profile, box, stages=2)).rate
    assert [stage.first for stage in found.stages] == [0, 2]
    assert divided(found) == {"net.columns": (32, 32)}


def test_a_stage_that_would_begin_with_a_runs_rows_begins_behind_the_run() -> None:
    """The search without groups would have the rows at the second stage's begin, as light layers follow them."""
    layers = [LayerBytes(name, 1, 1, 1) for name in ("columns", "between", "rows", "light", "lighter", "head")]
    widths = {0: LayerWidths(0, {"net.columns": 16}), 1: LayerWidths(0), 2: LayerWidths(0, sums=True)}
    times = [Times(1e-5, 2e-5), Times(1e-5, 2e-5), Times(0.04, 0.08), *[Times(1e-5, 2e-5)] * 3]
    profile = Profile("mlp", 1, layers, {"gpu": times}, {}, widths=widths)
    box = Cluster([Node("box", ["3xgpu"], Link("1 TB/s"))])
    found = plan_with_groups(PlanningProblem(profile, box, stages=2), 3)
    assert found.rate > 1.9 * best_plan(PlanningProblem(profile, box, stages=2), 3).rate
    assert divided(found) == {"net.columns": (8, 8)}


def test_members_have_room_for_rows_and_gradients() -> None:
    """The second has a part of both layers in each version, the gradients of these, the whole sum of rows with its
    gradient, and a part of what is kept, likewise; the first one a copy of its rows, and its part of the output."""
    layers = [LayerBytes(name, 1 << 20, 1 << 10, 1 << 10) for name in ("columns", "rows")]
    widths = {0: LayerWidths(0, {"net.columns": 64}), 1: LayerWidths(0, sums=True)}
    profile = Profile("mlp", 1, layers, {"gpu": [Times(0.1, 0.2)] * 2}, {}, widths=widths)
    (stage,) = plan_with_groups(PlanningProblem(profile, Cluster([Node("box", ["2xgpu"], Link("1 TB/s"))])), 1).stages
    assert stage.divided is not None
    copies = stage.memory.versions / stage.memory.weights
    assert stage.divided.taken[1] == (1 << 20) * (copies + 1) + 3 * (1 << 10)
    assert stage.divided.taken[0] == stage.memory.total + (1 << 19) * copies + (1 << 10)
