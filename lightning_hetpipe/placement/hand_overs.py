"""Hand-overs between user code and stages: a model that was taken apart has many, which may eat a pipeline's gain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lightning_hetpipe.capture.piece_search import TakenApart
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.placement.decision import Decision

HAND_OVER = 300e-6
"""Seconds that one segment costs beside its computation, forward and backward (``benchmarks/engine_cost.py``)."""

LEAST_GAIN = 0.05
"""Part of one stage's throughput that a pipeline must add to be worth its hand-overs."""


def without_gain(apart: TakenApart, pieces: Sequence[Piece], decision: Decision) -> str | None:
    """Say that the pipeline of ``decision`` is hardly faster than one stage; None where it is much faster, where no
    module was taken apart, and where there is one stage.

    Sections of user code never run at the same time. Their seconds are estimated from their share of the watched step.
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
