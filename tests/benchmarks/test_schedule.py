"""The benchmark of the schedule: its bound and its ideal, and the report."""

from dataclasses import replace

import pytest

from benchmarks.harness import Measurement
from benchmarks.schedule import SHAPES, TARGET_MS, ideal, longest, measure, report, task, variant

MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}


def measured(rate: float) -> Measurement:
    notes = {"overruns": 1, "passes": 100, "busy": [0.9, 0.5, 0.25, 0.125]}
    return Measurement("strategy", rate, cores=0.5, threads=1, loss=0.5, notes=notes)


@pytest.mark.parametrize("bottleneck", SHAPES)
def test_the_bound_is_the_longest_stage_and_the_schedule_all_but_reaches_it(bottleneck: str) -> None:
    each = task(bottleneck, 5)
    assert longest(each) == pytest.approx(0.005)
    assert len(each.pads) == each.stages
    assert 0.98 < ideal(each) <= 1 + 1e-9
    # Fewer minibatches in flight than stages leave bubbles.
    assert ideal(replace(each, in_flight=2)) < 0.9


def test_the_report_compares_with_1_over_t_max() -> None:
    aimed, small = variant("last", TARGET_MS), variant("last", 5)
    tasks = {aimed: task("last", TARGET_MS), small: task("last", 5), variant("first", 5): task("first", 5)}
    rounds = [{aimed: measured(49.5), small: measured(150.0)}, {aimed: measured(48.0), small: measured(160.0)}]
    outcome = report(MACHINE, tasks, rounds, {variant("first", 5): "it broke"})
    assert [figure.cells() for figure in outcome.figures] == [
        ("0.975", "0.960 .. 0.990", "0.98", "missed"),
        ("0.775", "0.750 .. 0.800", "", ""),
        ("?", "", "", ""),
    ]
    row = next(line for line in outcome.text.splitlines() if line.startswith(aimed))
    assert row.removeprefix(aimed).split() == ["48.75", "0.975", "1.000", "0.50", "1.0", "0.90", "0.50", "0.25", "0.12"]
    assert "it broke" in outcome.text
    assert not outcome.complete


@pytest.mark.slow
def test_stages_are_padded_under_a_trainer() -> None:
    found = measure(replace(task("first", 1), width=8, warmup=6, steps=6, tail=6))
    assert found.notes["passes"] == 2 * 4 * 17  # all minibatches but the watched one, of four stages
