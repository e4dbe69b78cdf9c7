"""Divisions of the layers that need no search: the split points of given stages, and the plan of a spread run.

The slowest stage is as fast as possible. :func:`partition` splits for equal devices, :func:`partition_within` also
within their memory. :func:`split_points_in_order` splits for given devices, :func:`best_split_points` for any costs.

A spread run itself divides the model by the bytes of its weights, so :func:`spread_plan` follows it. Frozen weights
count less. If activations fill a device, its later weights go to the next device, as in the run
(:mod:`lightning_hetpipe.placement.spread`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot
from lightning_hetpipe.planning.model.costs import Costs, between, kinds_of
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.search.problem import PlanningProblem

FULL = 0.85
"""Fraction of a device's bytes from which on it takes no more weights, because outputs of its layers need room."""

FROZEN = 0.25
"""Weight of a frozen byte relative to a trained byte, which comes with a gradient and two states of Adam."""

STEPS = 50
"""Halvings of the interval in which the smallest sufficient share of each device's room is searched."""


def partition(times: Sequence[float], stages: int) -> tuple[int, ...]:
    """Split layers into ``stages`` stages of at least one layer so that the longest stage time is smallest.

    Return the first layer of each stage. ``times`` are the layers' seconds, forward and backward, not negative. Ties
    are settled as in :func:`best_split_points`.
    """
    return best_split_points([between(times)] * stages)


def partition_within(times: Sequence[float], sizes: Sequence[int], room: Sequence[float]) -> tuple[int, ...]:
    """Split as :func:`partition` does, into stages whose bytes ``sizes`` fit into ``room``, which may be infinite.

    If no partition fits, return the one whose largest size, as a fraction of the stage's room, is smallest.
    """
    seconds, taken = between(times), between(sizes)
    longest = sum(times)
    return best_split_points([np.where(taken <= each, seconds, longest + taken / each) for each in room])


def split_points_in_order(
    profile: Profile, cluster: Cluster, slots: Sequence[DeviceSlot], recompute: bool = False
) -> tuple[int, ...]:
    """Return the first layer of each stage on ``slots``, which may repeat a device, with the smallest T_max.

    Memory is no limit. Neighbours on one device count as linked like any two devices of the node.

    Raises:
        SettingError: if the profile has no times of a device.
    """
    costs = Costs(profile, cluster, kinds_of(cluster, slots, apart=True), recompute)
    kinds = range(len(slots))
    return best_split_points([costs.stage(kinds, index) for index in kinds])


def best_split_points(costs: Sequence[NDArray[Any]]) -> tuple[int, ...]:
    """Return the first layer of each stage so that the highest cost of a stage is smallest.

    ``costs`` has for each stage an array of shape (n + 1, n + 1): cost by start boundary (rows) and end boundary
    (columns). Boundary b lies before layer b. Forbidden stages have a large cost.

    Dynamic programming over (stages used, layers placed) takes O(k n²) for n layers on k stages. Of several optimal
    partitions, it returns the one with the earliest last split point, and so on backwards. So stages before a split
    point are divided optimally, too.
    """
    chosen: list[NDArray[np.intp]] = []
    best: NDArray[Any] = costs[0][0]
    for cost in costs[1:]:
        worst = np.maximum(best[:, None], cost)
        chosen.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    splits = [len(best) - 1]
    for starts in reversed(chosen):
        splits.append(int(starts[splits[-1]]))
    return (0, *reversed(splits[1:]))


def stage_times(times: Sequence[float], splits: Sequence[int]) -> list[float]:
    """Return the seconds of each stage, for layers with ``times`` and stages that start at the layers ``splits``."""
    return [sum(times[a:b]) for a, b in zip(splits, [*splits[1:], len(times)], strict=True)]


def spread_plan(problem: PlanningProblem) -> Estimate:
    """Return the plan of a spread run by weights. If it does not fit, return the first other plan that fits, if any."""
    slots = list(problem.slots)
    if problem.stages not in (None, len(slots)):  # the first of equal devices, or the devices with the most memory
        alike = len({slot.device.name for slot in slots}) == 1
        chosen = range(problem.stages) if alike else roomiest([slot.device.memory for slot in slots], problem.stages)
        slots = [slots[index] for index in chosen]
    plans = (_estimated(problem, slots, where) for where in _divisions(problem, slots))
    first = next(plans)
    return first if first.fits else next((plan for plan in plans if plan.fits), first)


def _divisions(problem: PlanningProblem, slots: Sequence[DeviceSlot]) -> Iterator[list[int]]:
    """Yield the device of each layer: by the bytes of weights, then by the devices' room with and without a margin."""
    limits = [slot.device.memory for slot in slots]
    known = [limit for limit in limits if limit is not None]
    user = problem.profile.user
    sizes = [layer.parameters - (1 - FROZEN) * layer.frozen for layer in problem.profile.layers]
    sizes[-1] += user.trained + FROZEN * user.frozen
    home = divided(sizes, known if len(known) == len(slots) else [1] * len(slots))
    yield home
    for share in (FULL, 1.0):
        yield list(_filled(problem, home, limits, share))


def _filled(problem: PlanningProblem, home: Sequence[int], limits: Sequence[int | None], share: float) -> Iterator[int]:
    """Yield the device of each layer: its ``home``, or the first device behind it that is not full."""
    device = first = 0
    for layer, own in enumerate(home):
        if own > device:
            device, first = own, layer
        user = problem.profile.user if layer + 1 == len(home) else None
        while device + 1 < len(limits) and (limit := limits[device]) is not None:
            if problem.memory.spread(first, layer + 1, user).total <= share * limit:
                break
            device, first = device + 1, layer
        yield device


def _estimated(problem: PlanningProblem, slots: Sequence[DeviceSlot], devices: Sequence[int]) -> Estimate:
    """Estimate layers on ``devices``, and leave out devices without a layer."""
    splits = {device: layer for layer, device in reversed([*enumerate(devices)])}
    used = sorted(splits)
    return problem.estimate([slots[device] for device in used], [splits[device] for device in used], 1, spread=True)


def divided(sizes: Sequence[float], room: Sequence[float]) -> list[int]:
    """Return the stage of each of ``sizes``, in order, so that the largest sum relative to its ``room`` is minimal."""
    ends = [0, *accumulate(sizes)]

    def stages(share: float) -> list[int]:
        """Return the end of each stage if each takes as much as it may."""
        found = [0]
        for each in room:
            found.append(max(found[-1], bisect_left(ends, ends[found[-1]] + share * each + 0.5) - 1))
        return found[1:]

    low, high = 0.0, ends[-1] / min(room)
    for _ in range(STEPS):
        share = (low + high) / 2
        low, high = (low, share) if stages(share)[-1] == len(sizes) else (share, high)
    found = stages(high)
    return [next(stage for stage, end in enumerate(found) if place < end) for place in range(len(sizes))]


def roomiest(memory: Sequence[int | None], count: int) -> list[int]:
    """Return the indices of the ``count`` devices with the most ``memory``, in order, of equal devices the first."""
    room = [math.inf if each is None else each for each in memory]
    return sorted(sorted(range(len(room)), key=lambda index: -room[index])[:count])
