"""Hand-overs of a model that was taken apart: is a pipeline worth them?"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_hetpipe.capture.piece_search import TakenApart
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.placement.decision import HAND_OVER, Decision, without_gain


def apart(share: float) -> TakenApart:
    return TakenApart({"net": nn.Identity()}, share=share)


def pieces(*layers: int) -> list[Piece]:
    module = nn.Linear(1, 1)
    return [Piece(str(n), module, [Layer(f"{n}.{m}", module) for m in range(count)]) for n, count in enumerate(layers)]


def decision(*times: float, first: tuple[int, ...]) -> Decision:
    return Decision(first, [torch.device("cpu")] * len(times), 3, list(times))


@pytest.mark.parametrize(
    ("times", "share", "worth"),
    [
        ((0.1, 0.1), 1.0, True),
        ((0.1, 0.1), 0.04, False),  # user code takes nearly all
        ((0.1, 0.1), 0.6, True),
        ((HAND_OVER / 2, HAND_OVER / 2), 1.0, False),
        ((0.1, 0.001), 1.0, False),
    ],
)
def test_whether_it_is_worth_it(times: tuple[float, float], share: float, worth: bool) -> None:
    why = without_gain(apart(share), pieces(2, 2), decision(*times, first=(0, 2)))
    assert (why is None) == worth


def test_segments_are_counted() -> None:
    """Three pieces, of which the second one lies on both stages."""
    why = without_gain(apart(0.04), pieces(1, 2, 1), decision(0.1, 0.1, first=(0, 2)))
    assert why == (
        "a minibatch is estimated to take 4.8e+03 ms in 2 stages, with 4 hand-overs between these and user code, and"
        " 5e+03 ms in one stage"
    )


def test_one_stage_has_nothing_to_lose() -> None:
    assert without_gain(apart(0.1), pieces(1), decision(0.1, first=(0,))) is None
