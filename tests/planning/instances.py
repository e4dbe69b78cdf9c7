"""Small planning problems, and all of their solutions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

from hypothesis import strategies as st

from lightning_hetpipe.planning.model.cluster import Cluster, Device, DeviceSlot, Link, Node
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times

NAMES = ("fast", "slow", "odd")

Stages = tuple[tuple[DeviceSlot, int, int], ...]
"""Device, first layer, layer after the last."""


def whole(draw: st.DrawFn, low: int, high: int) -> int:
    return draw(st.integers(low, high))


@st.composite
def profiles(draw: st.DrawFn, most: int = 7) -> Profile:
    """Whole numbers, so that sums are exact and ties are ties."""
    count = whole(draw, 1, most)
    layers = []
    for index in range(count):
        output = whole(draw, 0, 6)
        kept = output + whole(draw, 0, 6)
        weights = whole(draw, 0, 5)
        frozen = draw(st.sampled_from([0, weights])) if index % 2 else whole(draw, 0, weights)
        layers.append(LayerBytes(f"layer {index}", weights, kept, output, whole(draw, 0, kept), frozen=frozen))
    times = {name: [Times(whole(draw, 0, 4), whole(draw, 0, 8)) for _ in range(count)] for name in NAMES}
    return Profile("small", 1, layers, times, {})


@st.composite
def clusters(draw: st.DrawFn, most: int = 4, limited: bool = True) -> Cluster:
    """Devices that are few, on one node or two, with slow links and fast ones."""
    memory = st.one_of(st.none(), st.integers(20, 120)) if limited else st.none()
    # Few different ones, so that some are alike.
    kinds = draw(st.lists(st.builds(Device, st.sampled_from(NAMES), memory), min_size=1, max_size=3))
    devices = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=most))
    links = st.builds(Link, st.sampled_from([1.0, 2.0, float("inf")]), st.sampled_from([0.0, 1.0]))
    split = whole(draw, 1, len(devices))
    nodes = [Node("one", devices[:split], draw(links))]
    if devices[split:]:
        nodes.append(Node("two", devices[split:], draw(links)))
    return Cluster(nodes, draw(links))


def divisions(layers: int, slots: Sequence[DeviceSlot], ordered: bool) -> Iterator[Stages]:
    """Every way to place all layers on some of ``slots``."""
    for count in range(1, min(layers, len(slots)) + 1):
        for chosen in combinations(slots, count) if ordered else permutations(slots, count):
            for splits in combinations(range(1, layers), count - 1):
                yield tuple(zip(chosen, (0, *splits), (*splits, layers), strict=True))


def bottleneck(profile: Profile, cluster: Cluster, stages: Stages, recompute: bool = False) -> float:
    """T_max in seconds, as the design defines it."""
    return max(takes(profile, cluster, stages, recompute))


def takes(profile: Profile, cluster: Cluster, stages: Stages, recompute: bool = False) -> list[float]:
    """Seconds of each stage."""
    found = []
    for index, (slot, first, after) in enumerate(stages):
        again = recompute and index + 1 < len(stages)
        own = profile.times_on(slot.device)[first:after]
        take = sum(each.forward * (2 if again else 1) + each.backward for each in own)
        if index:
            take += cluster.link_between(stages[index - 1][0], slot).seconds(profile.layers[first - 1].output)
        if index + 1 < len(stages):
            take += cluster.link_between(slot, stages[index + 1][0]).seconds(profile.layers[after - 1].output)
        found.append(take)
    return found
