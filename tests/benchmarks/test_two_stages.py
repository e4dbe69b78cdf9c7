"""The two-stage benchmark: its variants train the same model, and its ratios are formed within rounds."""

from dataclasses import replace

import pytest

from benchmarks.harness import Measurement
from benchmarks.training_task import Task
from benchmarks.two_stages import (
    ONE_THREAD,
    RATIOS,
    SCHEDULE_1F1B,
    TWO_STAGES,
    Round,
    choose,
    compare,
    measure,
    measure_schedule_1f1b,
    measure_two_at_once,
    report,
)

TINY = Task("plain", layers=4, width=8, batch=8, warmup=2, steps=3, tail=1)
STAGES_OVER_THREAD, STAGES_OVER_1F1B = RATIOS[:2]
MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}


def measured(name: str, rate: float) -> dict[str, Measurement]:
    return {name: Measurement(name, rate, cores=1.0, threads=1, loss=0.5)}


@pytest.mark.slow
def test_the_peer_trains_what_the_plain_trainer_trains() -> None:
    (plain,) = measure(TINY).values()
    pipelined = measure_schedule_1f1b(TINY, microbatches=(2, 4))
    assert plain.loss is not None
    assert [*pipelined] == ["2", "4"]
    assert [value.loss for value in pipelined.values()] == pytest.approx([plain.loss] * 2, rel=1e-5)


@pytest.mark.slow
def test_two_at_once_add_up_and_use_one_thread_each() -> None:
    (both,) = measure_two_at_once(TINY).values()
    assert both.threads == 1
    assert both.rate > 0


def test_the_strategy_trains_too() -> None:
    (piped,) = measure(replace(TINY, variant="strategy")).values()
    assert piped.loss is not None
    layers = piped.notes["layers"]
    assert isinstance(layers, list)
    assert len(layers) == 2
    assert sum(layers) == TINY.layers


@pytest.mark.slow
def test_evaluation_is_of_the_same_model() -> None:
    (plain,) = measure(replace(TINY, loop="test")).values()
    (piped,) = measure(replace(TINY, loop="test", variant="strategy")).values()
    assert plain.loss is not None
    assert piped.loss == plain.loss


def test_ratios_are_formed_within_rounds() -> None:
    rounds: list[Round] = [
        {TWO_STAGES: measured("strategy", 18.0), ONE_THREAD: measured("plain", 10.0)},
        {TWO_STAGES: measured("strategy", 2.0), ONE_THREAD: measured("plain", 1.0)},
        {TWO_STAGES: measured("strategy", 19.0), ONE_THREAD: measured("plain", 10.0)},
        {ONE_THREAD: measured("plain", 10.0)},
    ]
    spread = compare(rounds, STAGES_OVER_THREAD)
    assert spread is not None
    # The medians' own ratio would be 1.8.
    assert (spread.median, spread.low, spread.high) == pytest.approx((1.9, 1.8, 2.0))
    assert compare(rounds, STAGES_OVER_1F1B) is None


def test_the_peer_is_taken_at_its_best_median() -> None:
    rounds: list[Round] = [
        {SCHEDULE_1F1B: measured("2", 8.0) | measured("4", 9.0)},
        {SCHEDULE_1F1B: measured("2", 8.0) | measured("4", 1.0)},
        {SCHEDULE_1F1B: measured("2", 8.0) | measured("4", 2.0)},
    ]
    assert choose(rounds, SCHEDULE_1F1B) == "2"


def test_the_report_says_which_target_was_met_and_what_failed() -> None:
    rounds: list[Round] = [
        {
            TWO_STAGES: measured("strategy", 17.5),
            ONE_THREAD: measured("plain", 10.0),
            SCHEDULE_1F1B: measured("2", 12.0),
        }
    ]
    outcome = report(MACHINE, TINY, rounds, {"e": "it broke"})
    lines = outcome.text.splitlines()
    assert next(line for line in lines if line.startswith("a/b")).split()[-5:] == ["1.75", "..", "1.75", "1.70", "met"]
    assert next(line for line in lines if line.startswith("a/d")).split()[-1] == "missed"
    assert "it broke" in outcome.text
    assert not outcome.complete
