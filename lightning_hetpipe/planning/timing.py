"""Measures how long each layer takes, forward and backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

ROUNDS = 3
"""Timed rounds for each layer, after one that warms up."""


def layer_times(
    layers: Sequence[Callable[[], None]], rounds: int = ROUNDS, tick: Callable[[], object] = lambda: None
) -> list[float]:
    """Median seconds of each of ``layers``, over ``rounds`` rounds through all of them.

    Args:
        layers: For each layer a call that runs its forward and backward once, to completion. Layers take turns, so that
            a disturbance of the machine hits neighbours alike.
        rounds: How often each is timed, after one call that is not.
        tick: Is called after each of these.
    """
    times: list[list[float]] = [[] for _ in layers]
    for number in range(rounds + 1):
        for layer, seconds in zip(layers, times, strict=True):
            started = time.perf_counter()
            layer()
            if number:
                seconds.append(time.perf_counter() - started)
            tick()
    return [statistics.median(seconds) for seconds in times]
