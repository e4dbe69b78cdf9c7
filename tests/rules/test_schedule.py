"""The schedule as data: segments of pieces over stages, and a minibatch's route through them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetpipe.rules.schedule import Call, Instruction, Segment, Work, calls, route, segments

DRAWN = (
    Segment(0, piece=0, stage=0, first=0, last=1),
    Segment(1, piece=0, stage=1, first=2, last=3),
    Segment(2, piece=1, stage=1, first=4, last=4),
    Segment(3, piece=1, stage=2, first=5, last=6),
)
"""The encoder (layers 0-3) and decoder (4-6) on three stages that the module's docstring draws."""


@st.composite
def cut_pieces(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lengths of pieces, and cuts that fit them."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    others = draw(st.sets(st.integers(1, sum(lengths) - 1))) if sum(lengths) > 1 else set()
    return lengths, [0, *sorted(others)]


def test_the_drawn_example() -> None:
    assert segments([4, 3], [0, 2, 5]) == DRAWN
    assert [list(segment.layers) for segment in DRAWN] == [[0, 1], [2, 3], [4], [5, 6]]


def test_the_route_through_the_drawn_example() -> None:
    first, second, third, last = DRAWN
    encoder, decoder = calls([0, 1])
    assert route(DRAWN, (encoder, decoder)) == (
        Instruction(Work.FORWARD, first, encoder),
        Instruction(Work.FORWARD, second, encoder),
        Instruction(Work.FORWARD, third, decoder),
        Instruction(Work.TURN, last, decoder),
        Instruction(Work.BACKWARD, third, decoder),
        Instruction(Work.BACKWARD, second, encoder),
        Instruction(Work.BACKWARD, first, encoder),
    )


def test_the_calls_of_a_step() -> None:
    assert calls([0, 1, 0, 0]) == (
        Call(0, 0, ordinal=0, again=True),
        Call(1, 1, ordinal=0, again=False),
        Call(2, 0, ordinal=1, again=True),
        Call(3, 0, ordinal=2, again=False),
    )


def test_a_piece_that_is_called_again_is_visited_again() -> None:
    """Its last call may turn on a stage before the last."""
    first, second, third, last = DRAWN
    steps = route(DRAWN, calls([0, 1, 0]))
    assert [(step.work, step.segment, step.call.index) for step in steps] == [
        (Work.FORWARD, first, 0),
        (Work.FORWARD, second, 0),
        (Work.FORWARD, third, 1),
        (Work.FORWARD, last, 1),
        (Work.FORWARD, first, 2),
        (Work.TURN, second, 2),
        (Work.BACKWARD, first, 2),
        (Work.BACKWARD, last, 1),
        (Work.BACKWARD, third, 1),
        (Work.BACKWARD, second, 0),
        (Work.BACKWARD, first, 0),
    ]


def test_one_segment_is_a_turn() -> None:
    (only,) = segments([3], [0])
    (call,) = calls([0])
    assert route((only,), (call,)) == (Instruction(Work.TURN, only, call),)


@settings(deadline=None)
@given(cut_pieces())
def test_segments_cover_every_layer_once_and_in_order(case: tuple[list[int], list[int]]) -> None:
    lengths, cuts = case
    found = segments(lengths, cuts)
    assert [layer for segment in found for layer in segment.layers] == list(range(sum(lengths)))
    assert [segment.index for segment in found] == list(range(len(found)))


@settings(deadline=None)
@given(cut_pieces())
def test_a_segment_is_what_one_stage_runs_of_one_piece(case: tuple[list[int], list[int]]) -> None:
    lengths, cuts = case
    piece_of = [piece for piece, length in enumerate(lengths) for _ in range(length)]
    stage_of = [max(stage for stage, cut in enumerate(cuts) if cut <= layer) for layer in range(sum(lengths))]
    found = segments(lengths, cuts)
    for segment in found:
        assert {(piece_of[layer], stage_of[layer]) for layer in segment.layers} == {(segment.piece, segment.stage)}
    # No two of them could be one.
    assert len({(segment.piece, segment.stage) for segment in found}) == len(found)
    assert {segment.stage for segment in found} == set(range(len(cuts)))


@settings(deadline=None)
@given(cut_pieces())
def test_a_route_goes_forward_turns_and_comes_back(case: tuple[list[int], list[int]]) -> None:
    found = segments(*case)
    steps = route(found, calls(range(len(case[0]))))
    forwards = [step.segment for step in steps if step.work is Work.FORWARD]
    turns = [step.segment for step in steps if step.work is Work.TURN]
    backwards = [step.segment for step in steps if step.work is Work.BACKWARD]
    assert (*forwards, *turns) == found
    assert turns == [found[-1]]
    assert backwards == forwards[::-1]
    assert [step.segment for step in steps] == [*forwards, *turns, *backwards]


@pytest.mark.parametrize("cuts", [(), (1,), (0, 0), (0, 3, 2), (0, 7), (0, 8), (-1, 2)])
def test_split_points_that_do_not_fit_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must start at 0, increase, and stay below the number of layers, 7") as caught:
        segments([4, 3], cuts)
    assert f"split points {cuts}" in str(caught.value)
