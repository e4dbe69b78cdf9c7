"""Profiles and plans of any kind, for hypothesis."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from lightning_hetpipe.planning.model.cluster import LEAST_MEMORY
from lightning_hetpipe.planning.model.profile import LayerBytes, LayerWidths, Profile, Times, Width
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedMember, PlannedSplit, PlannedStage, PlannedWorker
from lightning_hetpipe.rules.versions import POLICIES

SECONDS = st.floats(0, 1e6, allow_subnormal=False)
COUNT = st.integers(0, 2**50)
NAMES = st.text(min_size=1, max_size=8)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    layer = st.builds(LayerBytes, NAMES, st.just(2**50), COUNT, COUNT, COUNT, st.booleans(), COUNT)
    layers = draw(st.lists(layer, min_size=1, max_size=4))
    times = st.lists(st.builds(Times, SECONDS, SECONDS, SECONDS), min_size=len(layers), max_size=len(layers))
    devices = draw(st.dictionaries(NAMES, times, min_size=1, max_size=3))
    memory = draw(st.dictionaries(st.sampled_from(sorted(devices)), st.integers(LEAST_MEMORY, 2**50)))
    estimated = draw(st.dictionaries(st.sampled_from(sorted(devices)), NAMES))
    speeds = draw(st.dictionaries(st.sampled_from(sorted(devices)), st.floats(1.0, 1e15)))
    half = len(layers) // 2
    calls = draw(
        st.sampled_from([[], [(0, len(layers))] * 2, [(0, half), (half, len(layers)), (0, half)]][: 2 + (half > 0)])
    )
    part = st.floats(0, 1, exclude_min=True, allow_subnormal=False)
    width = st.builds(Width, part, SECONDS, SECONDS, SECONDS)
    measured = st.dictionaries(NAMES, st.lists(width, min_size=1, max_size=3), max_size=2)
    units = st.dictionaries(NAMES, st.integers(1, 999), max_size=2)
    own = st.builds(LayerWidths, st.integers(0, len(layers) - 1), units, st.booleans(), measured)
    widths = draw(st.dictionaries(st.integers(0, len(layers) - 1), own, max_size=3))
    return Profile(
        draw(NAMES), draw(st.integers(1, 64)), layers, devices, memory, estimated, calls, speeds=speeds, widths=widths
    )


@st.composite
def groups(draw: st.DrawFn, stage: PlannedStage, number: int) -> PlannedStage:
    """``stage`` on a group, whose other devices have numbers from ``number`` + 1000 on; without a problem."""
    own = PlannedMember(stage.node, stage.device, draw(st.floats(0.1, 9)), stage.memory_bytes, stage.memory_limit_bytes)
    others = [
        PlannedMember(stage.node, f"{draw(NAMES)}:{1000 + number + each}", draw(st.floats(0, 9)), draw(COUNT))
        for each in range(draw(st.integers(1, 3)))
    ]
    place = draw(st.integers(0, len(others)))
    group = (*others[:place], own, *others[place:])
    counts = st.lists(st.integers(0, 64), min_size=len(group), max_size=len(group)).filter(any).map(tuple)
    splits = draw(st.dictionaries(NAMES, counts, max_size=3))
    return replace(stage, group=group, splits=tuple(map(PlannedSplit, splits, splits.values())))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Such as have no problem."""
    layers = draw(st.lists(NAMES, min_size=1, max_size=8))
    workers = []
    for worker in range(draw(st.integers(1, 3))):
        splits = sorted({0, *draw(st.lists(st.integers(0, len(layers) - 1), max_size=3)), len(layers)})
        stages = []
        for number, (first, after) in enumerate(pairwise(splits)):
            device = f"{draw(NAMES)}:{10 * worker + number}{draw(st.sampled_from(['', ' (estimated)']))}"
            used = draw(COUNT)
            limit = draw(st.none() | st.integers(max(1, used), 2**60))
            stage = PlannedStage("box", device, first, after - 1, draw(SECONDS), used, limit, draw(COUNT))
            stages.append(draw(st.just(stage) | groups(stage, 100 * worker + 10 * number)))
        workers.append(PlannedWorker(draw(SECONDS), tuple(stages)))
    bottleneck = max(stage.time_s for worker in workers for stage in worker.stages)
    rate = sum(worker.minibatches_per_second for worker in workers)
    few = st.integers(1, 9)
    return Plan(
        draw(NAMES),
        draw(few),
        draw(few),
        draw(few) - 1,
        bottleneck,
        rate,
        tuple(workers),
        tuple(layers),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([*POLICIES])),
        draw(few),
    )
