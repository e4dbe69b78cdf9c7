"""Contents of a run's timeline, and its trace, which viewers open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.simulate import StageTimes, simulate
from lightning_hetpipe.reporting.timeline import Timeline
from lightning_hetpipe.reporting.trace import together
from lightning_hetpipe.rules.schedule import LIGHTNING, USER_CODE, Span
from tests.planning.loads import busy
from tests.support.marks import explores

TIMES = [StageTimes(0.004, 0.008), StageTimes(0.007, 0.013), StageTimes(0.003, 0.006, loss=0.001)]
EXAMPLE = Timeline(
    (
        Span(USER_CODE, "training_step", 7, 0.5, 1.0),
        Span(0, "forward", 7, 1.0, 2.0),
        Span(1, "forward", 7, 2.0, 3.0),
        Span(LIGHTNING, "wait_for_minibatch", 7, 2.0, 9.0),
        Span(USER_CODE, "training_step", 7, 4.0, 6.0),
        Span(1, "loss", 7, 4.5, 6.0),
        Span(1, "backward", 7, 6.25, 8.0),
        Span(0, "backward", 7, 8.0, 9.0),
        Span(LIGHTNING, "step", 7, 9.0, 10.0),
        Span(0, "evaluate", 1, 10.0, 11.0),
        Span(0, "forward", 8, 12.0, 13.0),
    ),
    stages=2,
    in_flight=2,
    virtual_worker=3,
    versions={7: 5, 8: 6},
    zero=100.0,
    devices=("RTX-3090:0", "T4:1"),
)


def simulated(in_flight: int = 4, minibatches: int = 20) -> Timeline:
    return Timeline.simulated(simulate(TIMES, in_flight, minibatches, step=0.001), TIMES, in_flight)


def test_a_simulation_in_the_form_of_a_measured_run() -> None:
    """A turn is forward, loss and backward."""
    run = simulated(minibatches=1)
    assert [(span.row, span.work) for span in run.spans] == [
        (0, "forward"),
        (1, "forward"),
        (2, "forward"),
        (2, "loss"),
        (2, "backward"),
        (1, "backward"),
        (0, "backward"),
    ]
    assert run.extent == pytest.approx((0.0, 0.042))
    assert run.rows == [0, 1, 2]
    assert simulated().versions[20] == 16


def test_minibatches_and_rows() -> None:
    assert EXAMPLE.minibatches == range(7, 9)
    assert EXAMPLE.rows == [0, 1, USER_CODE, LIGHTNING]
    assert EXAMPLE.extent == (0.5, 13.0)
    empty = Timeline((), stages=2, in_flight=2)
    assert (empty.minibatches, empty.rows, empty.extent) == (range(0), [0, 1], (0.0, 0.0))


def test_rows_are_called_by_their_devices_where_these_are_known() -> None:
    assert [EXAMPLE.label(row) for row in EXAMPLE.rows[:3]] == ["stage 0, RTX-3090:0", "stage 1, T4:1", "user code"]
    assert simulated().label(2) == "stage 2"
    assert Timeline.simulated(simulate(TIMES, 4, 2), TIMES, 4, ["a", "b", "c"]).label(2) == "stage 2, c"
    assert EXAMPLE.between(7, 7).devices == EXAMPLE.devices


def test_it_says_in_a_line_what_it_is_of() -> None:
    assert repr(EXAMPLE) == "<Timeline of virtual worker 3, minibatches 7 to 8, Nm = 2 (measured)>"
    assert str(Timeline((), 2, 2)) == "virtual worker 0, no minibatches, Nm = 2 (simulated)"


def test_a_part_of_it() -> None:
    part = simulated().between(5, 8)
    assert part.minibatches == range(5, 9)
    assert list(part.versions) == [5, 6, 7, 8]
    assert len(part.spans) == 4 * 7
    whole = simulated()
    assert whole.between(1, 20) == whole


def test_an_evaluation_belongs_to_the_minibatches_around_it() -> None:
    assert [span.work for span in EXAMPLE.between(7, 8).spans].count("evaluate") == 1
    assert "evaluate" not in [span.work for span in EXAMPLE.between(7, 7).spans]


@pytest.mark.parametrize(("first", "last"), [(21, 30), (0, 0), (9, 8)])
def test_a_part_that_is_not_there(first: int, last: int) -> None:
    with pytest.raises(SettingError, match=rf"between\({first}, {last}\).* has minibatches 1 to 20"):
        simulated().between(first, last)
    with pytest.raises(SettingError, match="it is empty"):
        Timeline((), 2, 2).between(first, last)


def test_why_a_stage_waits() -> None:
    """On the last stage, between forward and backward, for the user's code; else because there is nothing to do."""
    assert [(wait.work, wait.minibatch, wait.start, wait.end) for wait in EXAMPLE.waits(1)] == [
        ("wait for user code", 7, 3.0, 4.5),
        ("wait for user code", 7, 6.0, 6.25),
    ]
    assert [(wait.work, wait.minibatch, wait.start, wait.end) for wait in EXAMPLE.waits(0)] == [
        ("idle", 7, 2.0, 8.0),
        ("idle", 1, 9.0, 10.0),
        ("idle", 8, 11.0, 12.0),
    ]


def test_the_turn_may_be_on_another_stage_than_the_last() -> None:
    """The last call of a step may be of a module that lies on earlier stages."""
    spans = tuple(span._replace(row=1 - span.row) if isinstance(span.row, int) else span for span in EXAMPLE.spans)
    turned = replace(EXAMPLE, spans=spans)
    assert [wait.work for wait in turned.waits(0)] == ["wait for user code"] * 2
    assert [wait.work for wait in turned.waits(1)] == ["idle"] * 3


def test_how_busy_a_stage_is() -> None:
    assert EXAMPLE.utilisation(0, 1.0, 9.0) == 2 / 8
    assert EXAMPLE.utilisation(0, 1.5, 2.0) == 1.0
    assert EXAMPLE.utilisation(1, 8.0, 13.0) == 0.0
    assert EXAMPLE.utilisation(1, 8.0, 8.0) == 0.0
    run = simulate(TIMES, 4, 20)
    timeline = Timeline.simulated(run, TIMES, 4)
    for stage in range(3):
        assert timeline.utilisation(stage, 0.0, run.published[-1]) == pytest.approx(busy(run, stage))


def test_how_many_are_in_flight() -> None:
    assert EXAMPLE.flights() == {7: (0.5, 9.0), 8: (12.0, 13.0)}
    assert EXAMPLE.in_flight_over_time() == [(0.5, 1), (9.0, 0), (12.0, 1), (13.0, 0)]


times = st.lists(
    st.builds(StageTimes, *[st.integers(1, 5).map(float)] * 2, loss=st.integers(0, 2).map(float)),
    min_size=1,
    max_size=4,
)


@explores(30)
@given(stages=times, in_flight=st.integers(1, 5), step=st.integers(0, 3).map(float))
def test_laws_of_any_timeline(stages: list[StageTimes], in_flight: int, step: float) -> None:
    last = len(stages) - 1
    stages = [StageTimes(each.forward, each.backward, loss=each.loss * (i == last)) for i, each in enumerate(stages)]
    run = simulate(stages, in_flight, 12, step=step)
    timeline = Timeline.simulated(run, stages, in_flight)
    counts = [count for _, count in timeline.in_flight_over_time()]
    assert max(counts) <= in_flight
    assert counts[-1] == 0
    for stage in range(len(stages)):
        row = timeline.row(stage)
        waits = list(timeline.waits(stage))
        assert all(one.end <= other.start for one, other in pairwise(row))
        covered = sum(span.end - span.start for span in [*row, *waits])
        assert covered == pytest.approx(row[-1].end - row[0].start)
    check(timeline.to_chrome_trace())


# The trace. What must be where: "Trace Event Format", the sections on complete, metadata, flow and counter events.

NUMBERS = {"ts", "dur"}
WANTED: Mapping[str, set[str]] = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "t": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}


def check(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The form of a trace; gives the spans of each row."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    named: dict[str, set[tuple[int, int]]] = {"thread_name": set(), "thread_sort_index": set()}
    arrows: dict[str, list[str]] = {}
    for event in trace["traceEvents"]:
        assert WANTED[event["ph"]] <= set(event)
        assert isinstance(event["name"], str)
        assert min(event["pid"], event["tid"]) >= 1, "viewers take 0 for the kernel"
        assert all(isinstance(event[key], int | float) for key in NUMBERS & set(event))
        where = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert set(event["args"]) in ({"name"}, {"sort_index"})
            if event["name"] in named:
                named[event["name"]].add(where)
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            rows.setdefault(where, []).append(event)
        elif event["ph"] in "stf":
            arrows.setdefault(event["id"], []).append(event["ph"])
            assert any(span["ts"] <= event["ts"] <= span["ts"] + span["dur"] for span in rows[where]), "binds to none"
    for where, spans in rows.items():
        assert where in named["thread_name"] & named["thread_sort_index"]
        for one, other in pairwise(spans):
            assert one["ts"] <= other["ts"], "rows are sorted"
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3, "spans of a row overlap"
    for kinds in arrows.values():
        assert "".join(kinds) == "s" + "t" * (len(kinds) - 2) + "f"
    return rows


def test_the_trace_of_a_run() -> None:
    trace = EXAMPLE.to_chrome_trace()
    rows = check(trace)
    assert {pid for pid, _ in rows} == {4}
    assert [span["name"] for span in rows[4, 2]] == [
        "forward 7",
        "wait for user code 7",
        "loss 7",
        "wait for user code 7",
        "backward 7",
    ]
    (forward, *_) = rows[4, 1]
    assert (forward["ts"], forward["dur"]) == (1e6, 1e6)
    assert forward["args"] == {"minibatch": 7, "version": 5}
    assert rows[4, 1][2]["args"] == {"batch": 1}
    assert trace["otherData"]["zero"] == 100.0
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["stage 0, RTX-3090:0", "stage 1, T4:1", USER_CODE, LIGHTNING]
    (process,) = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert process == "virtual worker 3"
    counts = [event["args"]["minibatches"] for event in trace["traceEvents"] if event["ph"] == "C"]
    assert counts == [1, 0, 1, 0]


def test_several_virtual_workers_in_one_trace() -> None:
    """By one clock: the other began 2.5 s later."""
    other = Timeline(EXAMPLE.spans, 2, 2, virtual_worker=4, zero=102.5)
    trace = together([other.to_chrome_trace(), EXAMPLE.to_chrome_trace()])
    rows = check(trace)
    assert rows[5, 1][0]["ts"] - rows[4, 1][0]["ts"] == 2.5e6
    times = [event["ts"] for event in trace["traceEvents"]]
    assert times == sorted(times)


def test_a_file(tmp_path: Path) -> None:
    EXAMPLE.save(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == EXAMPLE.to_chrome_trace()


def test_an_empty_trace_is_one_too() -> None:
    assert check(Timeline((), 2, 2).to_chrome_trace()) == {}
