"""The simulator keeps the laws of the schedule, and gives the figures that the design was made with."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.planning.model.simulate import StageTimes, Visits, simulate
from lightning_hetpipe.rules.schedule import Work, calls, segments
from tests.planning.loads import busy, loads, rate, varied
from tests.support.marks import fewer

EQUAL = [StageTimes(1.0, 2.0)] * 4
"""Backward takes twice as long as forward, as in most models."""

seconds = st.integers(0, 5).map(float)
some_stages = st.lists(
    st.builds(StageTimes, seconds.map(lambda s: s + 1), seconds, seconds, seconds, seconds), min_size=1, max_size=5
)


@pytest.mark.parametrize(("in_flight", "share"), [(2, 0.5), (3, 0.75), (4, 1.0), (6, 1.0)])
def test_equal_stages_are_busy_when_enough_is_in_flight(in_flight: int, share: float) -> None:
    """Nothing exceeds 1 / T_max, nor Nm / sum of T."""
    assert rate(simulate(EQUAL, in_flight, 240), 60) * 3 == pytest.approx(share, rel=0.01)


def test_first_in_first_out_holds_more_than_1f1b_does() -> None:
    """1F1B would hold 4, 3, 2 and 1."""
    assert simulate(EQUAL, 6, 100).held == (6, 6, 5, 1)


@pytest.mark.parametrize(("in_flight", "share"), [(4, 0.8), (5, 0.83), (6, 0.95), (8, 1.0)])
def test_the_pipeline_hides_a_synchronisation_of_one_stage_time(in_flight: int, share: float) -> None:
    """HetPipe's point: it goes on with what is in flight (section 5)."""
    run = simulate(EQUAL, in_flight, 40 * in_flight, synchronise=3.0)
    assert rate(run, 10 * in_flight) * 3 == pytest.approx(share, abs=0.006)


def test_a_wave_may_be_longer_than_what_is_in_flight() -> None:
    often = rate(varied(EQUAL, 4, 240, wave=4, synchronise=6.0), 40)
    assert rate(varied(EQUAL, 4, 240, wave=20, synchronise=6.0), 40) > often


def test_one_stage_alternates() -> None:
    run = simulate([StageTimes(1.0, 2.0, loss=0.5)], 1, 3, step=0.5)
    assert [(span.work, span.minibatch, span.start, span.end) for span in run.spans] == [
        (Work.TURN, 1, 0.0, 3.5),
        (Work.TURN, 2, 4.0, 7.5),
        (Work.TURN, 3, 8.0, 11.5),
    ]
    assert run.published == (4.0, 8.0, 12.0)
    assert busy(run, 0) == 10.5 / 12
    assert run.held == (1,)


def twice(changing: tuple[int, ...] = ()) -> Visits:
    """One module on two stages that is called twice."""
    return Visits(segments([2], [0, 1]), calls([0, 0]), changing)


def test_a_module_that_is_called_twice_is_visited_twice() -> None:
    run = simulate([StageTimes(1.0, 2.0), StageTimes(1.0, 1.0)], 1, 1, visits=twice())
    assert [(span.stage, span.work, span.start, span.end) for span in run.spans] == [
        (0, Work.FORWARD, 0.0, 1.0),
        (1, Work.FORWARD, 1.0, 2.0),
        (0, Work.FORWARD, 2.0, 3.0),
        (1, Work.TURN, 3.0, 5.0),
        (0, Work.BACKWARD, 5.0, 7.0),
        (1, Work.BACKWARD, 7.0, 8.0),
        (0, Work.BACKWARD, 8.0, 10.0),
    ]
    assert run.held == (1, 1)
    assert [(when, load[:2]) for when, load in loads(run, 0) if when in (1.0, 3.0, 10.0)][-1] == (10.0, (0, 0))


def test_enough_in_flight_hides_what_calls_wait_for() -> None:
    """Nothing exceeds 1 / T_max, which counts each visit."""
    run = simulate([StageTimes(1.0, 2.0)] * 2, 6, 240, visits=twice())
    assert rate(run, 60) * 6 == pytest.approx(1.0, rel=0.02)


def test_a_segment_that_changes_buffers_ends_one_minibatch_before_the_next() -> None:
    stages = [StageTimes(1.0, 2.0), StageTimes(1.0, 2.0)]
    free, bound = (simulate(stages, 6, 60, visits=twice(changing)) for changing in ((), (0, 1)))
    assert rate(bound, 6) < 0.9 * rate(free, 6)
    forwards = [span.minibatch for span in bound.spans if span.stage == 0 and span.work is Work.FORWARD]
    assert forwards == sorted(forwards)
    forwards = [span.minibatch for span in free.spans if span.stage == 0 and span.work is Work.FORWARD]
    assert forwards != sorted(forwards)


def test_receiving_is_part_of_the_task_that_needs_it() -> None:
    run = simulate([StageTimes(1.0, 2.0, receive_gradient=0.5), StageTimes(1.0, 2.0, receive=0.25)], 1, 1)
    assert [(span.stage, span.start, span.end) for span in run.spans] == [
        (0, 0.0, 1.0),
        (1, 1.0, 4.25),
        (0, 4.25, 6.75),
    ]


def test_links_count_towards_the_bottleneck() -> None:
    """T_max is forward + backward + transfers: the links of one stage keep that stage busy, and no other."""
    stages = [StageTimes(1.0, 2.0), StageTimes(1.0, 2.0, receive=0.25, receive_gradient=0.75), StageTimes(1.0, 2.0)]
    assert stages[1].total == 4.0
    assert rate(simulate(stages, 6, 240), 60) * 4 == pytest.approx(1.0, rel=0.01)


def test_jitter_is_drawn_for_the_seed() -> None:
    one, same, other = (varied(EQUAL, 4, 60, jitter=0.1, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    ratios = [(span.end - span.start) / EQUAL[0].of(span.work) for span in one.spans]
    assert min(ratios) < 0.9 < 1.1 < max(ratios)
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.02)


def test_jitter_of_a_task_does_not_depend_on_what_else_there_is() -> None:
    few, many = (varied(EQUAL, in_flight, 30, jitter=0.2) for in_flight in (2, 5))
    lengths = [{(s.stage, s.work, s.minibatch): round(s.end - s.start, 9) for s in run.spans} for run in (few, many)]
    assert lengths[0] == lengths[1]


def test_fewer_in_flight_lose_more_to_jitter() -> None:
    shares = [rate(varied(EQUAL, n, 600, jitter=0.3), 60) / rate(simulate(EQUAL, n, 600), 60) for n in (4, 8)]
    assert shares[0] < shares[1] < 1


def test_what_a_stage_holds_over_time() -> None:
    """The last stage's gradient waits until the first has its own, and Lightning takes both."""
    run = simulate([StageTimes(1.0, 2.0), StageTimes(1.0, 1.0)], 2, 2, step=0.5)
    assert loads(run, 0) == [
        (1.0, (1, 0, 1)),  # its forward is done,
        (1.0, (1, 0, 0)),  # and only what it was given must stay
        (2.0, (2, 0, 1)),
        (2.0, (2, 0, 0)),
        (3.0, (2, 0, 1)),
        (5.0, (1, 1, 0)),  # the backward of the first has ended,
        (5.0, (1, 1, 1)),
        (5.0, (1, 0, 1)),  # and its gradient is taken at once
        (7.0, (0, 1, 0)),
        (7.0, (0, 0, 0)),
    ]
    assert loads(run, 1) == [
        (2.0, (1, 0, 1)),
        (3.0, (0, 1, 0)),
        (4.0, (1, 1, 1)),
        (5.0, (0, 2, 0)),
        (5.0, (0, 1, 0)),
        (7.0, (0, 0, 0)),
    ]


@given(stages=some_stages, in_flight=st.integers(1, 7), step=seconds)
def test_loads_are_as_many_as_held_and_end_with_nothing(stages: list[StageTimes], in_flight: int, step: float) -> None:
    run = simulate(stages, in_flight, 20, step=step)
    for index in range(len(stages)):
        held = [load for _, load in loads(run, index)]
        assert max(load.held for load in held) == run.held[index]
        assert all(load.held + load.waiting <= in_flight and min(load) >= 0 for load in held), "L1"
        assert {load.whole for load in held} <= {0, 1}
        assert held[-1] == (0, 0, 0)


def test_four_uneven_stages_reach_on_average_what_the_design_says() -> None:
    """DESIGN, section 9: of 1/T_max at Nm = 2, 3, 4, 5 and 6, over random stages; T_max is at one of them."""
    draw = random.Random(0)
    pipelines = []
    for _ in range(*fewer([60], [15])):
        times = [draw.uniform(0.5, 1.0) for _ in range(4)]
        pipelines.append([StageTimes(t / 3, 2 * t / 3) for t in times])
    reached = []
    for in_flight in (2, 3, 4, 5, 6):
        shares = [rate(simulate(each, in_flight, 60), 20) * max(times.total for times in each) for each in pipelines]
        reached.append(sum(shares) / len(shares))
    assert reached == pytest.approx([0.57, 0.79, 0.983, 0.999, 1.0], abs=0.02)


@given(stages=some_stages, in_flight=st.integers(1, 7), step=seconds, wave=st.integers(1, 9), synchronise=seconds)
def test_the_laws(stages: list[StageTimes], in_flight: int, step: float, wave: int, synchronise: float) -> None:
    minibatches = 30
    run = varied(stages, in_flight, minibatches, step=step, wave=wave, synchronise=synchronise)
    assert len(run.published) == minibatches
    for index, times in enumerate(stages):
        spans = [span for span in run.spans if span.stage == index]
        assert all(one.end <= other.start for one, other in pairwise(spans)), "one task at a time"
        for work in Work:
            numbers = [span.minibatch for span in spans if span.work is work]
            assert numbers in ([], list(range(1, minibatches + 1))), "L2: in order of p"
        assert run.held[index] <= in_flight
        own = times.total if index + 1 == len(stages) else times.of(Work.FORWARD) + times.of(Work.BACKWARD)
        assert rate(run) * own <= 1 + 1e-9, "no faster than the bottleneck"
    starts = {span.minibatch: span.start for span in run.spans if span.stage == 0 and span.work is not Work.BACKWARD}
    for number in range(in_flight + 1, minibatches + 1):
        assert starts[number] >= run.published[number - in_flight - 1], "L1: its version is there"
    if in_flight == 1:  # nothing overlaps
        alone = sum(times.of(Work.FORWARD) + times.of(Work.BACKWARD) for times in stages) + stages[-1].loss
        waits = minibatches // wave * synchronise
        assert run.published[-1] == pytest.approx(minibatches * (alone + step) + waits)


@pytest.mark.parametrize("wrong", [{"stages": []}, {"in_flight": 0}, {"minibatches": 0}])
def test_what_no_pipeline_has_is_refused(wrong: dict[str, object]) -> None:
    given: dict[str, object] = {"stages": EQUAL, "in_flight": 2, "minibatches": 4} | wrong
    with pytest.raises(ValueError, match="Nm = "):
        simulate(**given)  # type: ignore[arg-type]


odd = st.floats(0.1, 5.0, allow_subnormal=False)


@given(
    drawn=st.lists(st.tuples(odd, odd, odd), min_size=1, max_size=5),
    in_flight=st.integers(1, 7),
    step=st.sampled_from([0.0, 0.7]),
    apart=st.randoms(use_true_random=False),
)
def test_a_pipeline_does_what_a_plain_loop_says(
    drawn: list[tuple[float, float, float]], in_flight: int, step: float, apart: random.Random
) -> None:
    stages = [StageTimes(*(each * (1 + apart.random() / 100) for each in own)) for own in drawn]  # no ties
    run = simulate(stages, in_flight, 15, step=step)
    starts, published = plain(stages, in_flight, 15, step)
    assert run.published == pytest.approx(published)
    tasks = {(span.minibatch, span.stage, span.work is Work.BACKWARD): span.start for span in run.spans}
    assert tasks == pytest.approx(starts)


def plain(
    stages: list[StageTimes], in_flight: int, count: int, step: float
) -> tuple[dict[tuple[int, int, bool], float], list[float]]:
    """When each task starts (minibatch, stage, whether it is a backward), and when each minibatch is published. Of all
    tasks that are ready, the one that can start first does; of one stage, the one that was ready first."""
    last, free = len(stages) - 1, [0.0] * len(stages)
    ready = {(p, 0, False): 0.0 for p in range(1, min(in_flight, count) + 1)}
    starts: dict[tuple[int, int, bool], float] = {}
    published: list[float] = []
    while ready:
        start, _, task = min((max(since, free[task[1]]), since, task) for task, since in ready.items())
        p, stage, backward = task
        del ready[task]
        starts[task] = start
        work = Work.BACKWARD if backward else Work.TURN if stage == last else Work.FORWARD
        free[stage] = end = start + stages[stage].of(work)
        if work is Work.FORWARD:
            ready[p, stage + 1, False] = end
        elif stage:
            ready[p, stage - 1, True] = end
        else:
            published.append(max(end, published[-1] if published else 0.0) + step)
            if p + in_flight <= count:
                ready[p + in_flight, 0, False] = published[-1]
    return starts, published
