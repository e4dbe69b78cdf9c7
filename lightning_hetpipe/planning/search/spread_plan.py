"""Plan of a spread run. Nothing is searched: the run itself divides the model by the bytes of its weights.

Frozen weights count less. If activations fill a device, its later weights go to the next device, as in the run
(:mod:`lightning_hetpipe.placement.spread`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from lightning_hetpipe.planning.model.cluster import DeviceSlot
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.search.problem import PlanningProblem

FULL = 0.85
"""Fraction of a device's bytes from which on it takes no more weights, because outputs of its layers need room."""

FROZEN = 0.25
"""Weight of a frozen byte relative to a trained byte, which comes with a gradient and two states of Adam."""

STEPS = 50
"""Halvings of the interval in which the smallest sufficient share of each device's room is searched."""


def spread_plan(problem: PlanningProblem) -> Estimate:
    """Return the plan of a spread run by weights. If it does not fit, return the first other plan that fits, if any."""
    slots = _slots(problem)
    plans = (_estimated(problem, slots, where) for where in _divisions(problem, slots))
    first = next(plans)
    return first if first.fits else next((plan for plan in plans if plan.fits), first)


def _slots(problem: PlanningProblem) -> list[DeviceSlot]:
    """Devices in their order: all, or the first of equal ones, or those with the most memory."""
    slots = list(problem.slots)
    if problem.stages in (None, len(slots)):
        return slots
    if len({slot.device.name for slot in slots}) == 1:
        return slots[: problem.stages]
    return [slots[index] for index in roomiest([slot.device.memory for slot in slots], problem.stages)]


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
        """End of each stage if each takes as much as it may."""
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
