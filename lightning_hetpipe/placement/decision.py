"""Decision on a fit's stages, their devices and the number in flight, made at the start of the fit.

If a model was taken apart, hand-overs between user code and stages may cost more than it gains (:func:`without_gain`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from lightning_hetpipe.capture.piece_search import TakenApart
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.capture.profiling import ProfilingInput
from lightning_hetpipe.pipeline.memory import PlannedMemory
from lightning_hetpipe.pipeline.split.member_pool import DeviceGroup
from lightning_hetpipe.rules.versions import STASH, WeightPolicy

HAND_OVER = 300e-6
"""Seconds that one segment costs beside its computation, forward and backward (``benchmarks/engine_cost.py``)."""

LEAST_GAIN = 0.05
"""Fraction of one stage's throughput that a pipeline must add to be worth its hand-overs."""


@dataclass(frozen=True)
class Decision:
    """Division of layers into stages, their devices, and how many minibatches are in flight.

    Attributes:
        split_points: The first layer of each stage.
        times: Seconds of each stage for one minibatch, forward and backward, or 0 without a measurement.
        names: Names of the stages' devices, if they were declared under names other than torch's.
        emulated: Whether stages take as long as on the devices ``names``, which are not here.
        planned: Memory of each stage. Empty if nothing was planned or devices are emulated.
        groups: Devices of each stage that has several.
        at: Decides anew for another Nm and weight policy. None if another Nm leaves stages unchanged.
    """

    split_points: tuple[int, ...]
    devices: Sequence[torch.device]
    in_flight: int
    times: list[float]
    explanation: Sequence[str] = ()
    names: Sequence[str] | None = None
    emulated: bool = False
    planned: Sequence[PlannedMemory] = ()
    weights: WeightPolicy = STASH
    groups: Mapping[int, DeviceGroup] = field(default_factory=dict)
    at: Callable[[int, WeightPolicy], Decision] | None = field(default=None, repr=False, compare=False)

    def in_groups(self, groups: Mapping[int, DeviceGroup]) -> Decision:
        """Return this decision with ``groups`` of devices for some of its stages."""
        lines = [f"stage {stage} is divided among {group}" for stage, group in groups.items()]
        return replace(self, groups=groups, explanation=[*self.explanation, *lines])


Decide = Callable[[ProfilingInput, Sequence[WeightPolicy]], Decision]
"""Function that decides after the first minibatch has shown the layers, for the first weight policy that fits."""


def without_gain(apart: TakenApart, pieces: Sequence[Piece], decision: Decision) -> str | None:
    """Explain that the pipeline of ``decision`` is hardly faster than one stage.

    Return None if it is much faster, if no module was taken apart, or if there is one stage. Sections of user code
    never run at the same time. Their seconds are estimated from their share of the watched step.
    """
    if not apart or len(decision.times) < 2:
        return None
    computed = sum(decision.times)
    user = computed * (1 - apart.share) / max(apart.share, 1e-3)
    ends = list(accumulate(len(piece.layers) for piece in pieces))
    starts = [end - len(piece.layers) for piece, end in zip(pieces, ends, strict=True)]
    after = [*decision.split_points[1:], ends[-1]]
    segments = [
        sum(start < last and end > first for start, end in zip(starts, ends, strict=True))
        for first, last in zip(decision.split_points, after, strict=True)
    ]
    stages = [seconds + HAND_OVER * count for seconds, count in zip(decision.times, segments, strict=True)]
    pipelined, alone = max(*stages, user + HAND_OVER * sum(segments)), computed + user
    if alone >= (1 + LEAST_GAIN) * pipelined:
        return None
    return (
        f"a minibatch is estimated to take {1000 * pipelined:.3g} ms in {len(stages)} stages, with"
        f" {sum(segments)} hand-overs between these and user code, and {1000 * alone:.3g} ms in one stage"
    )
