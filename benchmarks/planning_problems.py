"""Planning problems: random ones and their best solutions by trying all, a large one, and splits by hand."""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, combinations, permutations

from lightning_hetpipe.planning.model.catalogue import gpus
from lightning_hetpipe.planning.model.cluster import Cluster, Device, DeviceSlot, Link, Node
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.model.simulate import StageLoad
from lightning_hetpipe.planning.model.stage_memory import StageBytes
from lightning_hetpipe.planning.search.plans import ENOUGH
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.planning.search.split_points import partition

TICK = 2.0**-20
"""Seconds, of which all times of random problems are multiples, so that sums are exact."""

IN_FLIGHT = 3
LEAST = (StageLoad(1, 0), StageLoad(0, 1))
"""Loads that every stage of random problems has to have room for; the first of several for all in flight, too."""

STATE = 2.0
MOST_IN_FLIGHT = 24


def small(seed: int) -> tuple[Profile, Cluster]:
    """Up to 12 layers on up to 4 devices on one node or two, of which some are alike."""
    draw = random.Random(seed)
    count = draw.randint(4, 12)
    layers = [
        LayerBytes(str(n), draw.randrange(1 << 20), 1 << 20 | draw.randrange(1 << 22), draw.randrange(1 << 20))
        for n in range(count)
    ]
    names = ("a", "b", "c")
    times = {
        name: [Times(draw.randrange(1 << 14) * TICK, draw.randrange(1 << 15) * TICK) for _ in layers] for name in names
    }
    memory = draw.choice([None, sum(layer.kept for layer in layers) * 3 // 4])
    devices = [Device(draw.choice(names), memory) for _ in range(draw.randint(2, 4))]
    links = [Link(2.0 ** draw.randint(24, 34)) for _ in range(3)]
    split = draw.randint(1, len(devices))
    nodes = [Node("one", devices[:split], links[0])]
    if devices[split:]:
        nodes.append(Node("two", devices[split:], links[1]))
    return Profile("random", 1, layers, times, {}), Cluster(nodes, links[2])


def best_of_all(profile: Profile, cluster: Cluster) -> float | None:
    """T_max of the best of all splits, subsets and orders that have room for `LEAST`; None if none have."""
    memory = StageBytes(profile.layers, STATE)
    found = [
        _bottleneck(profile, cluster, slots, splits)
        for slots, splits in _all(len(profile.layers), cluster.slots)
        if _has_room(memory, len(profile.layers), slots, splits)
    ]
    return min(found, default=None)


def _all(layers: int, slots: Sequence[DeviceSlot]) -> Iterator[tuple[Sequence[DeviceSlot], Sequence[int]]]:
    for count in range(1, min(layers, len(slots)) + 1):
        for chosen in permutations(slots, count):
            for splits in combinations(range(1, layers), count - 1):
                yield chosen, (0, *splits)


def _bottleneck(profile: Profile, cluster: Cluster, slots: Sequence[DeviceSlot], splits: Sequence[int]) -> float:
    slowest = 0.0
    for index, (slot, first, after) in enumerate(zip(slots, splits, [*splits[1:], len(profile.layers)], strict=True)):
        take = sum(each.forward + each.backward for each in profile.times_on(slot.device)[first:after])
        if index:
            take += cluster.link_between(slots[index - 1], slot).seconds(profile.layers[first - 1].output)
        if index + 1 < len(slots):
            take += cluster.link_between(slot, slots[index + 1]).seconds(profile.layers[after - 1].output)
        slowest = max(slowest, take)
    return slowest


def _has_room(memory: StageBytes, layers: int, slots: Sequence[DeviceSlot], splits: Sequence[int]) -> bool:
    ends = [*splits[1:], layers]
    return all(
        slot.device.memory is None or memory.stage(first, after, load, IN_FLIGHT).total <= slot.device.memory
        for index, (slot, first, after) in enumerate(zip(slots, splits, ends, strict=True))
        for load in (LEAST if index or len(slots) == 1 else (*LEAST, StageLoad(IN_FLIGHT, 0)))
    )


def large() -> tuple[Profile, Cluster]:
    """1,000 layers on 16 devices of 4 types."""
    draw = random.Random(0)
    layers = [
        LayerBytes(str(n), draw.randrange(1 << 20, 1 << 24), draw.randrange(1 << 22, 1 << 25), draw.randrange(1 << 21))
        for n in range(1000)
    ]
    base = [(draw.uniform(0.2e-3, 2e-3), draw.uniform(0.4e-3, 4e-3)) for _ in layers]
    slower = {"a": 1.0, "b": 1.4, "c": 2.1, "d": 3.3}
    times = {}
    for name, factor in slower.items():
        factors = [factor * draw.uniform(0.9, 1.1) for _ in layers]
        times[name] = [Times(f * by, b * by) for (f, b), by in zip(base, factors, strict=True)]
    devices = [Device(name, 14 << 30) for name in slower for _ in range(4)]
    return Profile("large", 8, layers, times, {}), Cluster([Node("rack", devices, Link(12e9, 1e-5))])


FOUR = ("A100-40", "V100-16", "RTX-2080-Ti", "T4")


def transformer(
    blocks: int,
    width: int = 1024,
    length: int = 1024,
    heads: int = 16,
    names: Sequence[str] = FOUR,
    bytes_: int = 4,
    batch: int = 2,
    words: int = 50257,
) -> Profile:
    """A language model on GPUs by their data sheets, at 60% of what the catalogue estimates."""
    tokens = batch * length
    output = tokens * width * bytes_
    kept = (34 * tokens * width + 5 * batch * heads * length**2) * bytes_ // 2
    layers = [
        LayerBytes("embedding", (words + length) * width * bytes_, output + 8 * tokens, output, 8 * tokens),
        *(LayerBytes(f"block {n}", 12 * width**2 * bytes_, kept, output) for n in range(blocks)),
        LayerBytes("head", words * width * bytes_, 2 * tokens * words * bytes_ + output, tokens * words * bytes_),
    ]
    block = tokens * (24 * width**2 + 4 * length * width)
    work = [8 * tokens * width, *[block] * blocks, 2 * tokens * words * width]
    speeds = {name: 0.6 * gpus()[name].speed("16") for name in names}
    times = {name: [Times(each / speed, 2 * each / speed) for each in work] for name, speed in speeds.items()}
    return Profile("transformer", batch, layers, times, {})


def neo(bytes_: int) -> tuple[Profile, Cluster]:
    """A model as large as GPT-Neo-2.7B on four GPUs of three types on two nodes, with ``bytes_`` for each number."""
    names = ("A100-80", "A100-40", "V100-16")
    nodes = [Node("a", names[:2], "25 GB/s"), Node("v", ["2xV100-16"], "12 GB/s")]
    return transformer(32, 2560, 2048, 20, names, bytes_), Cluster(nodes, "1.25 GB/s").with_memory({})


def rack(nodes: int, devices: int, mixed: bool = False) -> Cluster:
    """Nodes of one type each, of four types, or with all four types on each."""
    each = [[FOUR[(node + mixed * place) % 4] for place in range(devices)] for node in range(nodes)]
    return Cluster([Node(f"node {n}", own, "12 GB/s") for n, own in enumerate(each)], "10 Gbit/s").with_memory({})


def by_hand(profile: Profile, slots: Sequence[DeviceSlot]) -> Mapping[str, tuple[int, ...]]:
    """The first layers of stages on ``slots``, in their order, as people divide models."""
    layers, stages = len(profile.layers), len(slots)
    speeds = [1 / sum(t.forward + t.backward for t in profile.times_on(slot.device)) for slot in slots]
    work = [t.forward + t.backward for t in profile.times_on(slots[0].device)]
    return {
        "equal layers": tuple(index * layers // stages for index in range(stages)),
        "equal parameters": partition([layer.parameters for layer in profile.layers], stages),
        "speed-proportional": _proportional(work, speeds),
    }


def _proportional(work: Sequence[float], speeds: Sequence[float]) -> tuple[int, ...]:
    """Cuts where the work that lies before them comes nearest to the share of the devices before them."""
    done = [share / sum(work) for share in accumulate(work, initial=0.0)]
    splits = [0]
    for wanted in list(accumulate(speeds))[:-1]:
        left = len(speeds) - len(splits)  # stages behind this split, each of which needs a layer
        allowed = range(splits[-1] + 1, len(work) - left + 1)
        splits.append(min(allowed, key=lambda split: abs(done[split] - wanted / sum(speeds))))
    return tuple(splits)


def best_in_flight(
    profile: Profile, cluster: Cluster, splits: Sequence[int], state: float, recompute: bool
) -> Estimate | None:
    """Estimate of these stages on all devices at the best Nm that fits; None if none does."""
    found: list[Estimate] = []
    for in_flight in range(1, MOST_IN_FLIGHT + 1):
        each = PlanningProblem(profile, cluster, optimizer=state, recompute=recompute).estimate(
            cluster.slots, splits, in_flight
        )
        if not each.fits:
            break
        found.append(each)
    best = max((each.rate for each in found), default=0.0)
    return next((each for each in found if each.rate >= ENOUGH * best), None)
