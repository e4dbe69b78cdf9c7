"""Split points: the first layer of each stage, chosen so that the slowest stage is as fast as possible.

:func:`partition` splits for equal devices, :func:`partition_within` also within their memory,
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
    """Split layers into ``stages`` stages of at least one layer so that the longest stage time is smallest.

    Return the first layer of each stage. ``times`` are the layers' seconds, forward and backward, not negative. Ties
    are settled as in :func:`best_split_points`.

    Raises:
        ValueError: if there are more stages than layers, or no stage.
    """
    _check(len(times), stages)
    return best_split_points([between(times)] * stages)


def partition_within(times: Sequence[float], sizes: Sequence[int], room: Sequence[float]) -> tuple[int, ...]:
    """Split as :func:`partition` does, into stages whose bytes ``sizes`` fit into ``room``, which may be infinite.

    If no partition fits, return the one whose largest size, as a fraction of the stage's room, is smallest.
    """
    _check(len(times), len(room))
    seconds, taken = between(times), between(sizes)
    longest = sum(times)
    return best_split_points([np.where(taken <= each, seconds, longest + taken / each) for each in room])


def split_points_in_order(
    profile: Profile, cluster: Cluster, slots: Sequence[DeviceSlot], recompute: bool = False
) -> tuple[int, ...]:
    """Return the first layer of each stage on ``slots``, which may repeat a device, with the smallest T_max.

    Memory is no limit. Neighbours on one device count as linked like any two devices of the node.

    Raises:
        ValueError: if there are more stages than layers.
        SettingError: if the profile has no times of a device.
    """
    _check(len(profile.layers), len(slots))
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


def _check(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise ValueError(f"cannot divide {layers} layers among {stages} stages")
