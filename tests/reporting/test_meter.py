"""Samples, minibatches and training time, counted by a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_hetpipe.reporting.report import Meter, batch_size
from tests.conftest import Clock


def batch(samples: int) -> Any:
    return {"x": torch.zeros(samples, 3), "note": "text"}


def test_samples_per_second_and_busy(clock: Clock) -> None:
    meter = Meter(stages=2)
    meter.start()
    for samples in (4, 4, 2):
        meter.count(batch(samples), seconds=2.5)
    clock.now += 5.0
    assert meter.interval([1.0, 4.0]) == {
        "hetpipe/samples_per_second": 2.0,
        "hetpipe/stage_0/busy": 0.2,
        "hetpipe/stage_1/busy": 0.8,
        "hetpipe/in_flight": 1.5,
    }
    assert (meter.samples, meter.minibatches) == (10, 3)


def test_an_interval_begins_where_the_last_one_ended(clock: Clock) -> None:
    meter = Meter(stages=1)
    meter.start()
    meter.count(batch(10))
    clock.now += 2.0
    meter.interval([2.0])
    meter.count(batch(30), seconds=20.0)
    clock.now += 10.0
    assert meter.interval([7.0]) == {
        "hetpipe/samples_per_second": 3.0,
        "hetpipe/stage_0/busy": 0.5,
        "hetpipe/in_flight": 2.0,
    }
    clock.now += 1.0
    assert meter.interval([7.0])["hetpipe/in_flight"] == 0.0


def test_time_between_stop_and_start_does_not_count(clock: Clock) -> None:
    """Validation, and what is between epochs."""
    meter = Meter(stages=1)
    meter.start()
    clock.now += 1.0
    meter.stop()
    clock.now += 100.0
    assert meter.seconds == 1.0
    meter.start()
    clock.now += 3.0
    meter.count(batch(8))
    assert meter.interval([1.0]) == {
        "hetpipe/samples_per_second": 2.0,
        "hetpipe/stage_0/busy": 0.25,
        "hetpipe/in_flight": 0.0,
    }


def test_nothing_is_more_than_busy_all_the_time(clock: Clock) -> None:
    """A task counts when it ends, so that an interval may get more than its share."""
    meter = Meter(stages=1)
    meter.start()
    clock.now += 1.0
    assert meter.interval([3.0])["hetpipe/stage_0/busy"] == 1.0


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (torch.zeros(7, 2), 7),
        ([torch.zeros(3), torch.zeros(5)], 3),
        ({"text": "words", "x": (torch.tensor(1.0), torch.zeros(6))}, 6),
        (torch.tensor(1.0), 1),
        ("words", 1),
        (None, 1),
    ],
)
def test_batch_size(value: Any, size: int) -> None:
    assert batch_size(value) == size
