"""The benchmark of what a timeline costs: its pairs differ by the timeline alone, and are compared within rounds."""

from dataclasses import replace

import pytest

from benchmarks.harness import Measurement
from benchmarks.timeline_costs import PAIRS, compare, measure, report, shortened, tasks
from benchmarks.training_task import Task

MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}


def measured(rate: float) -> Measurement:
    return Measurement("strategy", rate, cores=1.0, threads=1, loss=0.5)


def test_pairs_differ_by_the_timeline_alone() -> None:
    found = tasks()
    for pair in PAIRS:
        assert not found[pair.off].timeline
        assert found[pair.on] == replace(found[pair.off], timeline=True)
        assert shortened(found[pair.on]).steps < found[pair.on].steps


def test_ratios_are_formed_within_rounds() -> None:
    pair, other = PAIRS[:2]
    rounds = [
        {pair.off: measured(100.0), pair.on: measured(99.0)},
        {pair.off: measured(50.0), pair.on: measured(49.0), other.on: measured(1.0)},
        {pair.off: measured(10.0)},
    ]
    spread = compare(rounds, pair)
    assert spread is not None
    assert (spread.low, spread.high) == pytest.approx((0.98, 0.99))
    assert compare(rounds, other) is None


def test_the_report_says_what_was_met() -> None:
    pair, other, third = PAIRS
    rounds = [{pair.off: measured(50.0), pair.on: measured(49.5), other.off: measured(100.0), other.on: measured(90.0)}]
    outcome = report(MACHINE, rounds, {third.on: "it broke"})
    rows = {line.partition("  ")[0]: line.split() for line in outcome.text.splitlines()}
    assert rows[pair.label][-8:] == ["0.990", "0.990", "..", "0.990", "0.98", "met", "202", "202"]
    assert rows[other.label][-3:] == ["missed", "1111", "1111"]
    assert "?" in rows[third.label]
    assert "it broke" in outcome.text
    assert not outcome.complete


@pytest.mark.slow
def test_the_timeline_is_recorded_where_it_is_said_to_be() -> None:
    task = Task("strategy", layers=4, width=8, batch=8, warmup=4, steps=4, tail=2)
    off, on = measure(task), measure(replace(task, timeline=True))
    assert "spans" not in off.notes
    assert on.notes["spans"]
