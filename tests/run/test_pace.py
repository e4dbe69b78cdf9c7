"""The pace of a virtual worker is that of its pipeline, however long it waits for others."""

from __future__ import annotations

import itertools
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hetpipe.run.extensions.telemetry import Pace

STAGE, STAGES = 1.0, 3
"""Seconds of each stage, and their number: a minibatch takes STAGE * STAGES, and one comes out every STAGE."""


class Pipelined:
    """A pipeline on a scripted clock, and Lightning's loop over it.

    Args:
        in_flight: Nm.
        wave: W.
        until: Gives the time until which the wait at the end of a wave lasts, for the time at which it begins.
    """

    def __init__(self, in_flight: int, wave: int, until: Any) -> None:
        self.time = 0.0
        self.in_flight, self.wave, self.until = in_flight, wave, until
        self.flying: deque[Any] = deque()
        self.out = 0.0  # when the last one comes out
        self.numbers = itertools.count(1)
        self.pace = Pace(self._flying, lambda: self.time)

    def _flying(self) -> list[Any]:
        for each in self.flying:
            each.ended = each.ended_at <= self.time
        return list(self.flying)

    def _submit(self) -> None:
        self.out = max(self.time + STAGES * STAGE, self.out + STAGE)
        self.flying.append(SimpleNamespace(number=next(self.numbers), ended_at=self.out, ended=False))

    def run(self, minibatches: int) -> None:
        for count in range(1, minibatches + 1):
            while len(self.flying) < self.in_flight:
                self._submit()
            minibatch = self.flying.popleft()
            self.time = max(self.time, minibatch.ended_at)
            self.pace.finished(minibatch, ())
            self.pace.stepped(minibatch.number)
            if count % self.wave == 0:
                with self.pace.pause(), self.pace.pause():  # as a cut is within one
                    self.time = max(self.time, self.until(self.time))


@pytest.mark.parametrize("in_flight", [3, 4, 6])
@pytest.mark.parametrize("more", [0, 1, 5])
@pytest.mark.parametrize("waits", [0.0, 0.5, 2.0, 10.0, 1000.0])
def test_waits_for_others_do_not_count(in_flight: int, more: int, waits: float) -> None:
    pipeline = Pipelined(in_flight, in_flight + more, lambda now: now + waits)
    pipeline.run(8 * pipeline.wave)
    # What the pipeline loses by running empty in a wait that nearly hides it is its own.
    assert pipeline.pace.rate == pytest.approx(1 / STAGE, rel=0.25 if 0 < waits < 10 else 1e-9)


def test_with_one_in_flight_each_wait_is_lost() -> None:
    pipeline = Pipelined(1, 1, lambda now: now + 100)
    pipeline.run(5)
    assert pipeline.pace.rate == pytest.approx(1 / (STAGE * STAGES))


def test_an_epoch_of_its_own_and_too_few_minibatches() -> None:
    pipeline = Pipelined(3, 3, lambda now: now)
    found = [pipeline.pace.rate]
    for minibatches in (2, 1):
        pipeline.run(minibatches)
        found.append(pipeline.pace.rate)
    pipeline.pace.epoch_begins(1)
    assert [*found, pipeline.pace.rate] == [None, None, pytest.approx(1 / STAGE), None]
