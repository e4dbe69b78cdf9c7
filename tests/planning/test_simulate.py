"""The simulator keeps the laws of the schedule, and gives the figures that the design was made with."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.planning.simulate import Simulation, StageTimes, simulate
from lightning_hetpipe.rules.schedule import Work

EQUAL = [StageTimes(1.0, 2.0)] * 4
"""Backward takes twice as long as forward, as in most models."""

seconds = st.integers(0, 5).map(float)
some_stages = st.lists(
    st.builds(StageTimes, seconds.map(lambda s: s + 1), seconds, seconds, seconds), min_size=1, max_size=5
)


@pytest.mark.parametrize(("in_flight", "share"), [(2, 0.5), (3, 0.75), (4, 1.0), (6, 1.0)])
def test_equal_stages_are_busy_when_enough_is_in_flight(in_flight: int, share: float) -> None:
    """Nothing exceeds 1 / T_max, nor Nm / sum of T."""
    assert simulate(EQUAL, in_flight, 240).rate(60) * 3 == pytest.approx(share, rel=0.01)


def test_first_in_first_out_holds_more_than_1f1b_does() -> None:
    """1F1B would hold 4, 3, 2 and 1."""
    assert simulate(EQUAL, 6, 100).held == (6, 6, 5, 1)


@pytest.mark.parametrize(("in_flight", "share"), [(4, 0.8), (5, 0.83), (6, 0.95), (8, 1.0)])
def test_the_pipeline_hides_a_synchronisation_of_one_stage_time(in_flight: int, share: float) -> None:
    """HetPipe's point: it goes on with what is in flight (section 5)."""
    run = simulate(EQUAL, in_flight, 40 * in_flight, synchronise=3.0)
    assert run.rate(10 * in_flight) * 3 == pytest.approx(share, abs=0.006)


def test_a_wave_may_be_longer_than_what_is_in_flight() -> None:
    often = simulate(EQUAL, 4, 240, wave=4, synchronise=6.0).rate(40)
    assert simulate(EQUAL, 4, 240, wave=20, synchronise=6.0).rate(40) > often


def test_one_stage_alternates() -> None:
    run = simulate([StageTimes(1.0, 2.0, loss=0.5)], 1, 3, step=0.5)
    assert [(span.work, span.minibatch, span.start, span.end) for span in run.spans] == [
        (Work.TURN, 1, 0.0, 3.5),
        (Work.TURN, 2, 4.0, 7.5),
        (Work.TURN, 3, 8.0, 11.5),
    ]
    assert run.published == (4.0, 8.0, 12.0)
    assert run.busy(0) == 10.5 / 12
    assert run.held == (1,)


def test_links_delay_values_and_gradients() -> None:
    run = simulate([StageTimes(1.0, 2.0), StageTimes(1.0, 2.0, receive=0.25)], 1, 1)
    assert [(span.stage, span.start, span.end) for span in run.spans] == [
        (0, 0.0, 1.0),
        (1, 1.25, 4.25),
        (0, 4.5, 6.5),
    ]


@given(stages=some_stages, in_flight=st.integers(1, 7), step=seconds, wave=st.integers(1, 9), synchronise=seconds)
def test_the_laws(stages: list[StageTimes], in_flight: int, step: float, wave: int, synchronise: float) -> None:
    minibatches = 30
    run = simulate(stages, in_flight, minibatches, step=step, wave=wave, synchronise=synchronise)
    assert len(run.published) == minibatches
    for index, times in enumerate(stages):
        spans = [span for span in run.spans if span.stage == index]
        assert all(one.end <= other.start for one, other in pairwise(spans)), "one task at a time"
        for work in Work:
            numbers = [span.minibatch for span in spans if span.work is work]
            assert numbers in ([], list(range(1, minibatches + 1))), "L2: in order of p"
        assert run.held[index] <= in_flight
        own = times.forward + times.backward + (times.loss if index + 1 == len(stages) else 0.0)
        assert run.rate() * own <= 1 + 1e-9, "no faster than the bottleneck"
    starts = {span.minibatch: span.start for span in run.spans if span.stage == 0 and span.work is not Work.BACKWARD}
    for number in range(in_flight + 1, minibatches + 1):
        assert starts[number] >= run.published[number - in_flight - 1], "L1: its version is there"
    if in_flight == 1:  # nothing overlaps
        alone = sum(times.forward + times.backward + 2 * times.receive for times in stages)
        alone += stages[-1].loss - 2 * stages[0].receive
        waits = minibatches // wave * synchronise
        assert run.published[-1] == pytest.approx(minibatches * (alone + step) + waits)


@pytest.mark.parametrize("wrong", [{"stages": []}, {"in_flight": 0}, {"minibatches": 0}, {"wave": 0}])
def test_what_no_pipeline_has_is_refused(wrong: dict[str, object]) -> None:
    given: dict[str, object] = {"stages": EQUAL, "in_flight": 2, "minibatches": 4, "wave": 2} | wrong
    with pytest.raises(ValueError, match="Nm = "):
        simulate(**given)  # type: ignore[arg-type]


def test_a_rate_needs_minibatches() -> None:
    run: Simulation = simulate(EQUAL, 2, 4)
    assert run.rate(1) > 0
    with pytest.raises(ValueError, match="edge=2 leaves none of 4"):
        run.rate(2)
