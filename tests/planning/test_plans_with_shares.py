"""Plans of stages on devices in their order, some of which divide layers by given shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot, Link, Node
from lightning_hetpipe.planning.model.divided_stage import MEMBER_CALL
from lightning_hetpipe.planning.model.profile import LayerBytes, LayerWidths, Profile, Times
from lightning_hetpipe.planning.search.grouped_plans import plan_with_shares
from lightning_hetpipe.planning.search.plans import ENOUGH
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.rules.channel_layouts import apportioned

MANY = 12
"""Minibatches in flight at which few devices are as fast as the slowest stage."""

UNITS = 12
"""Units of each layer; bytes are multiples of it, as a plan rounds them."""

Problem = tuple[Profile, Cluster, tuple[tuple[DeviceSlot, ...], ...], dict[tuple[DeviceSlot, ...], tuple[int, ...]]]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Layers of which each that can be divided is a run by itself, and two stages or three."""
    count = draw(st.integers(3, 5))
    layers = [
        LayerBytes(f"layer {n}", 0, 1, UNITS * draw(st.integers(0, 3)), UNITS * draw(st.integers(1, 3)))
        for n in range(count)
    ]
    times = {name: [Times(*[draw(st.integers(1, 9)) / 2] * 2) for _ in range(count)] for name in ("fast", "slow")}
    widths = {n: LayerWidths(n, {f"layer {n}": UNITS}) for n in range(count) if draw(st.booleans())}
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    names = [draw(st.sampled_from(["fast", "slow"])) for _ in range(sum(sizes))]
    box = Cluster([Node("box", names, Link(draw(st.sampled_from([math.inf, 8.0 * UNITS, UNITS]))))])
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    parts = tuple(box.slots[start : start + size] for start, size in zip(starts, sizes, strict=True))
    shares = {part: tuple(draw(st.integers(1, 4)) for _ in part) for part in parts if len(part) > 1}
    return Profile("small", 1, layers, times, {}, widths=widths), box, parts, shares


def seconds(profile: Profile, box: Cluster, part: Sequence[DeviceSlot], shares: Sequence[int], layer: int) -> float:
    """The layer's time on the longest device of the group, with what goes to it and comes from it, there and back."""
    times = [sum(profile.times_on(slot.device)[layer][:2]) for slot in part]
    if len(part) == 1 or layer not in profile.widths:
        return times[0]
    found = []
    for slot, own, count in zip(part, times, apportioned(UNITS, shares), strict=True):
        link, each = box.link_between(part[0], slot), count / UNITS
        moved = link.seconds(profile.layers[layer].given) + profile.layers[layer].output * each / link.bandwidth
        found.append(own * each + (2 * (moved + len(part) * MEMBER_CALL) if each else 0.0))
    return max(found)


def bottleneck(problem: Problem) -> float:
    """The least T_max of all split points."""
    profile, box, parts, shares = problem
    best = math.inf
    for later in combinations(range(1, len(profile.layers)), len(parts) - 1):
        takes = []
        for stage, (first, after) in enumerate(zip((0, *later), (*later, len(profile.layers)), strict=True)):
            part = parts[stage]
            own = sum(seconds(profile, box, part, shares.get(part, ()), layer) for layer in range(first, after))
            link = box.nodes[0].own_link
            received = [profile.crossing(link, at) for at in (first, after) if 0 < at < len(profile.layers)]
            takes.append(own + sum(received))
        best = min(best, max(takes))
    return best


@given(problems())
def test_no_split_points_are_faster(problem: Problem) -> None:
    profile, box, parts, shares = problem
    found = plan_with_shares(PlanningProblem(profile, box, optimizer="sgd"), MANY, parts, shares)
    assert [stage.slot for stage in found.stages] == [part[0] for part in parts]
    assert found.bottleneck <= bottleneck(problem) / ENOUGH * (1 + 1e-6)
    for stage, part in zip(found.stages, parts, strict=True):
        divided = set(range(stage.first, stage.last + 1)) & profile.widths.keys()
        counts = {f"layer {n}": apportioned(UNITS, shares[part]) for n in divided} if part in shares else {}
        assert (stage.divided.counts if stage.divided else {}) == counts
