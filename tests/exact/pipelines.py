"""HetPipeStrategy with chosen cuts, and with stages that dawdle."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

from lightning_hetpipe import HetPipeStrategy


class Pinned(HetPipeStrategy):
    """A pipeline that is cut where the test says instead of where measured times say.

    Args:
        cuts: the first layer of each stage. Cuts past the last layer move to the last layers: a network with modules of
            the user's own is exported, and what computes nothing there (``nn.Identity``) is no layer.
        in_flight: Nm.
        settings: Others; weights are stashed by default, as the oracle has it.
    """

    def __init__(self, cuts: Sequence[int], in_flight: int, **settings: Any) -> None:
        super().__init__(stages=len(cuts), in_flight=in_flight, **{"weights": "stash", **settings})
        self.cuts = tuple(cuts)
        self._overrides["planned"] = len(cuts) > 1  # a pipeline also with one minibatch in flight
        self._devices.choose_split_points = self._cut  # type: ignore[method-assign]

    def _cut(self, times: Sequence[float], stages: int) -> tuple[int, ...]:
        assert stages == len(self.cuts)
        return tuple(min(cut, len(times) - stages + stage) for stage, cut in enumerate(self.cuts))


def even(layers: int, stages: int, in_flight: int, **settings: Any) -> Pinned:
    """A pipeline of ``stages`` stages with equal numbers of layers."""
    return Pinned([layers * stage // stages for stage in range(stages)], in_flight, **settings)


class Delays:
    """Holds up tasks of stages for 0 to 3 ms each, otherwise in each run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.tasks: list[tuple[int, str, int]] = []

    def __call__(self, stage: int, work: str, minibatch: int) -> None:
        self.tasks.append((stage, work, minibatch))
        # Half of the tasks are on time, so that stages overtake and wait for each other in turns.
        delay = random.Random(f"{self.seed} {stage} {work} {minibatch}").uniform(-0.003, 0.003)
        if delay > 0:
            threading.Event().wait(delay)


def delayed(strategy: Pinned, seed: int) -> Pinned:
    strategy._before_pass = Delays(seed)
    return strategy
