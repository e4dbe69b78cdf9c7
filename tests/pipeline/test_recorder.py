"""Contents of the recorder: whose, of which minibatches, and never more than it says; by a clock of the test's own."""

from __future__ import annotations

import itertools

import pytest

from lightning_hetpipe.pipeline import recorder as module
from lightning_hetpipe.pipeline.recorder import EVALUATED, KEPT, Recorder, Window
from lightning_hetpipe.rules.schedule import LIGHTNING, USER_CODE, Span
from tests.conftest import Clock


class Ticking(Clock):
    """Each look at it takes a second."""

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now

    def time(self) -> float:
        return 5000.0


@pytest.fixture(autouse=True)
def ticking(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    clock = Ticking()
    monkeypatch.setattr(module, "time", clock)
    return clock


def passed(recorder: Recorder, stage: int, work: str, minibatch: int) -> None:
    after = recorder.passes(None)(stage, work, minibatch)
    assert after is not None
    after()


def train(recorder: Recorder, minibatches: range) -> None:
    for minibatch in minibatches:
        recorder.submitted(minibatch, max(0, minibatch - 3))
        for stage, work in ((0, "forward"), (1, "forward"), (1, "loss"), (1, "backward"), (0, "backward")):
            passed(recorder, stage, work, minibatch)


def kept(recorder: Recorder) -> list[int]:
    return sorted({span.minibatch for span in recorder.spans() if span.work != "evaluate"})


def test_passes_are_spans_since_zero() -> None:
    recorder = Recorder(Window())
    assert (recorder.zero, recorder.zero_date) == (1001.0, 5000.0)
    train(recorder, range(7, 8))
    assert recorder.spans() == (
        Span(0, "forward", 7, 1.0, 2.0),
        Span(1, "forward", 7, 3.0, 4.0),
        Span(1, "loss", 7, 5.0, 6.0),
        Span(1, "backward", 7, 7.0, 8.0),
        Span(0, "backward", 7, 9.0, 10.0),
    )
    assert recorder.versions() == {7: 4}


def test_what_stages_call_besides_is_within_the_span(ticking: Ticking) -> None:
    """The sleep of an emulated device, say."""
    called: list[tuple[int, str, int]] = []

    def before(stage: int, work: str, minibatch: int) -> None:
        called.append((stage, work, minibatch))
        ticking.now += 10.0

    recorder = Recorder(Window())
    recorder.submitted(1, 0)
    after = recorder.passes(before)(0, "forward", 1)
    assert after is not None
    after()
    assert called == [(0, "forward", 1)]
    assert recorder.spans() == (Span(0, "forward", 1, 1.0, 12.0),)


def test_it_keeps_the_last_minibatches_and_no_more() -> None:
    recorder = Recorder(Window())
    train(recorder, range(2, 3000))
    assert kept(recorder) == list(range(3000 - KEPT, 3000))
    assert len(recorder.spans()) == 5 * KEPT
    assert len(recorder.versions()) == KEPT
    passed(recorder, 0, "backward", 3000 - KEPT - 1)  # too late
    assert kept(recorder) == list(range(3000 - KEPT, 3000))


def test_it_keeps_a_window() -> None:
    recorder = Recorder(Window(100, 120))
    train(recorder, range(2, 1000))
    assert kept(recorder) == list(range(100, 121))
    assert list(recorder.versions()) == list(range(100, 121))


def test_evaluations_are_bounded_on_their_own() -> None:
    """Thousands of their batches do not push out what was trained before."""
    recorder = Recorder(Window())
    train(recorder, range(2, 5))
    for batch in range(EVALUATED + 50):
        passed(recorder, 0, "evaluate", batch)
    assert kept(recorder) == [2, 3, 4]
    assert sum(span.work == "evaluate" for span in recorder.spans()) == EVALUATED


def test_an_evaluation_outside_of_the_window_is_not_kept() -> None:
    recorder = Recorder(Window(4, 5))
    for minibatch in range(2, 8):
        train(recorder, range(minibatch, minibatch + 1))
        passed(recorder, 0, "evaluate", 50 + minibatch)
    assert [span.minibatch for span in recorder.spans() if span.work == "evaluate"] == [54, 55]


def test_what_was_discarded_is_forgotten() -> None:
    """An epoch ends early; the next one uses the numbers again."""
    recorder = Recorder(Window())
    train(recorder, range(2, 8))
    recorder.forget(after=4)
    assert kept(recorder) == [2, 3, 4]
    train(recorder, range(5, 6))
    assert kept(recorder) == [2, 3, 4, 5]
    assert len(recorder.spans()) == 4 * 5


def test_lightning_may_go_back() -> None:
    """As after a search for a learning rate, which is a run of its own."""
    recorder = Recorder(Window())
    train(recorder, range(2, 8))
    train(recorder, range(2, 4))
    assert kept(recorder) == [2, 3]
    assert len(recorder.spans()) == 2 * 5


def test_a_batch_is_fetched_before_its_minibatch_begins() -> None:
    recorder = Recorder(Window())
    train(recorder, range(2, 3))
    recorder.enter("fetch", 3)
    recorder.leave()
    recorder.enter("fetch", 4)  # there is none: the epoch is over
    recorder.leave()
    recorder.submitted(3, 0)
    assert [(span.work, span.minibatch) for span in recorder.spans() if span.row == LIGHTNING] == [("fetch", 3)]


def test_lightnings_thread_does_one_thing_at_a_time() -> None:
    """Its step goes on until it does something for us; and one section may come within another."""
    recorder = Recorder(Window())
    recorder.submitted(2, 0)
    recorder.enter("wait_for_minibatch", 2)
    recorder.leave(then_step=True)
    recorder.enter("evaluation", 2)
    recorder.enter("synchronise", 2)
    recorder.leave()
    recorder.leave()
    recorder.enter("publish", 2)
    recorder.leave()
    spans = recorder.spans()
    assert [span.work for span in spans] == [
        "wait_for_minibatch",
        "step",
        "evaluation",
        "synchronise",
        "evaluation",
        "publish",
    ]
    assert all(one.end <= other.start for one, other in itertools.pairwise(spans))


def test_who_reads_sees_what_is_going_on() -> None:
    """A run's last step was in no timeline, as nothing came after it."""
    recorder = Recorder(Window())
    recorder.submitted(2, 0)
    recorder.enter("wait_for_minibatch", 2)
    recorder.leave(then_step=True)
    recorder.pause()
    assert [span.work for span in recorder.spans()] == ["wait_for_minibatch", "step"]


def test_sections_of_user_code() -> None:
    recorder = Recorder(Window())
    recorder.submitted(2, 0)
    section = recorder.section(2)
    for _ in range(2):
        section.enter()
        section.leave()
    assert [(span.row, span.work, span.minibatch) for span in recorder.spans()] == [(USER_CODE, "training_step", 2)] * 2
