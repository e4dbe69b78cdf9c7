"""Split points: the first layer of each stage, chosen so that the slowest stage is as fast as possible.

:func:`partition` splits for equal devices, and :func:`partition_within` within their memory;
:func:`split_points_in_order` for given devices, and :func:`best_split_points` for stages of any costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot
from lightning_hetpipe.planning.model.costs import Costs, between, kinds_of
from lightning_hetpipe.planning.model.profile import Profile


def partition(times: Sequence[float], stages: int) -> tuple[int, ...]:
    """The first layer of each stage, in the contiguous partition with the least maximal stage time.

    Every stage gets at least one layer. Ties are settled as in :func:`best_split_points`.

    Args:
        times: Seconds of each layer, forward and backward; not negative.
        stages: k, from 1 to ``len(times)``.

    Raises:
        ValueError: if there are more stages than layers, or no stage.
    """
    _check(len(times), stages)
    return best_split_points([between(times)] * stages)


def partition_within(times: Sequence[float], sizes: Sequence[int], room: Sequence[float]) -> tuple[int, ...]:
    """:func:`partition` into stages that have ``room`` for the ``sizes`` of their layers.

    Where there is no such partition, it is the one whose largest size, as a share of the stage's room, is least.

    Args:
        times: Seconds of each layer.
        sizes: Bytes of each layer.
        room: Bytes of each stage; infinite for no limit.
    """
    _check(len(times), len(room))
    seconds, taken = between(times), between(sizes)
    longest = sum(times)
    return best_split_points([np.where(taken <= each, seconds, longest + taken / each) for each in room])


def split_points_in_order(
    profile: Profile, cluster: Cluster, slots: Sequence[DeviceSlot], recompute: bool = False
) -> tuple[int, ...]:
    """The first layer of each of ``len(slots)`` stages on ``slots``, which may share a device, with the least T_max.

    Memory is no limit, and neighbours on one device are taken to be linked as any two of its node are.

    Raises:
        ValueError: if there are more stages than layers.
        SettingError: where the profile has no times of a device.
    """
    _check(len(profile.layers), len(slots))
    costs = Costs(profile, cluster, kinds_of(cluster, slots, apart=True), recompute)
    kinds = range(len(slots))
    return best_split_points([costs.stage(kinds, index) for index in kinds])


def best_split_points(costs: Sequence[NDArray[Any]]) -> tuple[int, ...]:
    """The first layer of each stage, where the most that a stage costs is least.

    Dynamic programming over (stages used, layers placed); O(k n²) for n layers on k stages. Of several optimal
    partitions it takes the one whose last split point is earliest, and so on backwards: the stages before a split point
    are divided as well as they can be, too.

    Args:
        costs: For each stage, an array of (n + 1, n + 1): its cost by the boundaries at which it starts (rows) and
            ends (columns), where boundary b lies before layer b. Where it may not, something large.
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
    """Seconds of each stage, for layers with ``times`` and stages that start at the layers ``splits``."""
    return [sum(times[a:b]) for a, b in zip(splits, [*splits[1:], len(times)], strict=True)]


def _check(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise ValueError(f"cannot divide {layers} layers among {stages} stages")
