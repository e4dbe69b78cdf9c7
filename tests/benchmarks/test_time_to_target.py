"""The time to a target loss: synchronous variants train alike, and times are read from curves as they should be."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from itertools import count

import pytest
import torch

from benchmarks import time_to_target
from benchmarks.harness import Measurement, Options, ProcessFailed
from benchmarks.results import section
from benchmarks.time_to_target import (
    AUTO,
    NAME,
    PARTS,
    PLAIN,
    SCHEDULE_1F1B,
    STASH,
    SYNC,
    VARIANTS,
    block,
    fastest,
    measure,
    reached,
    report,
    run,
)
from benchmarks.time_to_target_worker import Job, batches, train_with_trainer

MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}
TINY = Job(
    "plain",
    lr=0.01,
    updates=6,
    every=2,
    texts=8,
    length=8,
    width=8,
    blocks=2,
    source_bytes=12_000,
    validation=16,
    cut=2,
)


def tiny(name: str) -> Job:
    """A variant of the benchmark, with next to nothing to train."""
    job = VARIANTS[name]
    return replace(TINY, variant=job.variant, parts=job.parts, weights=job.weights, in_flight=job.in_flight)


def measured(losses: list[float], rate: float = 1.0) -> Measurement:
    """A run with a validation every 2 updates, so many of which it makes in a second."""
    seconds = [2 * (index + 1) / rate for index in range(len(losses))]
    notes = {"seconds": seconds, "losses": losses, "start_s": 1.0}
    return Measurement("plain", rate, cores=1.0, threads=1, loss=losses[-1], notes=notes)


def test_sync_takes_plain_trainings_updates() -> None:
    """To the bit, if plain training adds the same parts of an update's texts; else sums associate differently."""
    plain, accumulated, sync = (
        train_with_trainer(job) for job in (tiny(PLAIN), replace(tiny(PLAIN), parts=4), tiny(SYNC))
    )
    assert len(plain.numbers("losses")) == 3
    assert sync.numbers("losses") == accumulated.numbers("losses")
    assert sync.numbers("losses") == pytest.approx(plain.numbers("losses"), rel=1e-5)


@pytest.mark.slow
def test_schedule_1f1b_takes_plain_trainings_updates() -> None:
    """To the bit, as its microbatches are the parts that are accumulated: their number is a power of two."""
    (accumulated, piped) = (measure(job, count(1)) for job in (replace(tiny(PLAIN), parts=4), tiny(SCHEDULE_1F1B)))
    assert piped.numbers("losses") == accumulated.numbers("losses")


def test_other_policies_train_on_other_weights() -> None:
    plain, stash, auto = (train_with_trainer(tiny(name)).numbers("losses") for name in (PLAIN, STASH, AUTO))
    assert len({plain[-1], stash[-1], auto[-1]}) == 3


def test_an_update_has_the_same_texts_in_all_variants() -> None:
    whole = [inputs for inputs, _ in batches(TINY, TINY.texts)]
    parts = [inputs for inputs, _ in batches(TINY, TINY.texts // 4)]
    assert len(parts) == 4 * len(whole)  # also at an epoch's end
    assert torch.equal(torch.cat(parts), torch.cat(whole))
    others = [inputs for inputs, _ in batches(replace(TINY, seed=2), TINY.texts)]
    assert not torch.equal(torch.cat(others), torch.cat(whole))
    assert {job.texts % parts for job in VARIANTS.values() for parts in (*PARTS, job.parts)} == {0}


def test_the_target_is_reached_between_two_validations() -> None:
    run = measured([4.0, 3.0, 1.0, 3.0], rate=4.0)
    point = reached(run, 2.0, every=2)
    assert point is not None
    assert (point.seconds, point.updates) == pytest.approx((1.25, 5.0))
    point = reached(run, 4.0, every=2)
    assert point is not None
    assert (point.seconds, point.updates) == (0.5, 2.0)
    assert reached(run, 0.5, every=2) is None


def test_the_report_compares_times_within_rounds() -> None:
    jobs = {name: tiny(name) for name in (PLAIN, SYNC, STASH)}
    rounds = [
        {PLAIN: measured([3.0, 1.0], rate=1.0), SYNC: measured([3.0, 1.0], rate=1.5), STASH: measured([3.0, 2.5])},
        {PLAIN: measured([3.0, 1.0], rate=2.0), SYNC: measured([3.0, 1.0], rate=4.0), STASH: measured([3.0, 1.0])},
    ]
    outcome = report(MACHINE, jobs, rounds, {SCHEDULE_1F1B: "it broke"}, target=2.0)
    figures = {figure.name: figure.spread for figure in outcome.figures}
    faster = figures[f"time to target: that of {PLAIN[2:]}, over that of {SYNC[2:]}"]
    assert faster is not None
    assert (faster.median, faster.low, faster.high) == pytest.approx((1.75, 1.5, 2.0))
    same = figures[f"updates to target over plain's, {SYNC[2:]}"]
    assert same is not None
    assert (same.low, same.high) == pytest.approx((1.0, 1.0))
    # What was not reached in a round has no time to compare.
    assert figures[f"time to target: that of {PLAIN[2:]}, over that of {STASH[2:]}"] is None
    assert figures[f"updates per second over plain's, {STASH[2:]}"] is not None
    assert "1 of 2 never" in outcome.text
    kept = {NAME: section(outcome, Options(quick=False, rounds=2), date(2026, 11, 24))}
    assert f"| {SYNC[2:]} | {VARIANTS[SYNC].lr:g} | 1.00 (1.00 .. 1.00) | 1.75 (1.50 .. 2.00) | 1.75 " in block(kept)
    assert f"| {STASH[2:]} | {VARIANTS[STASH].lr:g} | – |" in block(kept)
    assert "it broke" in outcome.text
    assert not outcome.complete


def test_the_number_of_microbatches_is_the_fastest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {2: 1.0, 4: 3.0, 8: 2.0}
    monkeypatch.setattr(time_to_target, "measure", lambda job, seeds: measured([1.0], rate=speeds[job.parts]))
    assert fastest(tiny(SYNC)) == replace(tiny(SYNC), parts=4)

    def fail(*_: object) -> Measurement:
        raise ProcessFailed("it broke")

    monkeypatch.setattr(time_to_target, "measure", fail)
    assert fastest(tiny(SYNC)) == tiny(SYNC)


@pytest.mark.slow
def test_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_to_target, "VARIANTS", {name: tiny(name) for name in VARIANTS})
    monkeypatch.setattr(time_to_target, "QUICK_TARGET", 5.6)
    monkeypatch.setattr(time_to_target, "QUICK_UPDATES", TINY.updates)
    outcome = run(Options(quick=True, rounds=1))
    assert outcome.complete, outcome.text
    assert "never" not in outcome.text
    assert all(figure.spread is not None for figure in outcome.figures)
