"""Divides layers, in order, among stages, so that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def partition(times: Sequence[float], stages: int) -> tuple[int, ...]:
    """The first layer of each stage, in the contiguous partition with the least maximal stage time.

    Dynamic programming over (stages used, layers placed); O(k n²) for n layers on k stages. Every stage gets at least
    one layer. Of several optimal partitions it takes the one whose last cut is earliest, and so on backwards.

    Args:
        times: Seconds of each layer, forward and backward; not negative.
        stages: k, from 1 to ``len(times)``.

    Raises:
        ValueError: if there are more stages than layers, or no stage.
    """
    n = len(times)
    if not 1 <= stages <= n:
        raise ValueError(f"cannot divide {n} layers among {stages} stages")
    before = [0.0, *accumulate(times)]  # time of the layers before each
    best = [[float("inf")] * (n + 1) for _ in range(stages + 1)]
    cut = [[0] * (n + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for k in range(1, stages + 1):
        for end in range(k, n + 1):
            for start in range(k - 1, end):
                slowest = max(best[k - 1][start], before[end] - before[start])
                if slowest < best[k][end]:
                    best[k][end], cut[k][end] = slowest, start
    cuts: list[int] = []
    end = n
    for k in range(stages, 0, -1):
        end = cut[k][end]
        cuts.append(end)
    return tuple(reversed(cuts))


def stage_times(times: Sequence[float], cuts: Sequence[int]) -> list[float]:
    """Seconds of each stage, for layers with ``times`` and stages that start at ``cuts``."""
    return [sum(times[a:b]) for a, b in zip(cuts, [*cuts[1:], len(times)], strict=True)]
