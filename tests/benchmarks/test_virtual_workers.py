"""The benchmark of several virtual workers: what adds up, what is compared, and that processes train what they say."""

from dataclasses import replace

import pytest

from benchmarks.harness import Measurement
from benchmarks.training_task import Task
from benchmarks.virtual_workers import (
    EMULATED_VARIANTS,
    EQUAL_1,
    EQUAL_4,
    REAL_DDP,
    REAL_PLAIN,
    REAL_VARIANTS,
    REAL_VWS,
    Ratio,
    bound,
    compare,
    measure,
    of_all,
    report,
    shortened,
    wave_seconds,
)

MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}
TASKS = {**EMULATED_VARIANTS, **REAL_VARIANTS}
TINY = Task("strategy", layers=4, width=8, batch=8, warmup=4, steps=8, tail=4, workers=2)


def measured(rate: float, **notes: float) -> Measurement:
    return Measurement("strategy", rate, cores=0.5, threads=1, loss=0.5, notes=notes)


def test_processes_add_up() -> None:
    both = of_all([measured(10.0, waited=0.1, overruns=2, passes=100), measured(12.0, waited=0.3, passes=50)])
    assert both.rate == 22.0
    assert both.cores == 1.0
    assert both.loss == 0.5
    assert both.notes == {"processes": 2, "waited": 0.2, "overruns": 1.0, "passes": 75.0}


def test_samples_are_compared_and_not_minibatches() -> None:
    rounds = [
        {REAL_VWS: measured(16.0), REAL_PLAIN: measured(4.0), EQUAL_1: measured(40.0), EQUAL_4: measured(152.0)},
        {REAL_VWS: measured(8.0)},
    ]
    half = compare(TASKS, rounds, Ratio("", REAL_VWS, REAL_PLAIN))
    assert half is not None
    assert half.median == 2.0  # of batches that are half as large
    four = compare(TASKS, rounds, Ratio("", EQUAL_4, EQUAL_1, times=4))
    assert four is not None
    assert four.median == pytest.approx(0.95)
    assert compare(TASKS, rounds, Ratio("", REAL_VWS, REAL_DDP)) is None


def test_every_variant_trains_on_as_much() -> None:
    assert {task.batch * task.workers for task in REAL_VARIANTS.values()} == {256}
    for task in TASKS.values():
        for each in (task, shortened(task)):
            assert each.warmup % each.log_every == each.steps % each.log_every == 0, "metrics would miss the window"
            assert len(each.pads) in (0, each.stages)


def test_the_bound_is_the_longest_stage() -> None:
    task = Task("strategy", batch=5, workers=3, pads=((0.01, 0.02), (0.02, 0.03)))
    assert bound(task) == pytest.approx(3 * 5 / 0.05)
    assert bound(replace(task, pads=())) is None


def test_a_wave_takes_as_long_as_its_minibatches() -> None:
    task = Task("strategy", batch=5, workers=3, in_flight=8)
    assert wave_seconds(task, rate=150.0) == pytest.approx(0.8)
    assert wave_seconds(replace(task, wave=2), rate=150.0) == pytest.approx(0.2)
    assert wave_seconds(replace(task, in_flight=None), rate=150.0) == pytest.approx(0.1)


def test_the_report_says_which_target_was_met_and_what_failed() -> None:
    rounds = [
        {
            EQUAL_1: measured(45.0, overruns=1.0, passes=100.0),
            EQUAL_4: measured(176.4, waited=0.05, passes=100.0),
            REAL_VWS: measured(6.0, waited=0.1),
            REAL_DDP: measured(8.0),
        }
    ]
    tasks = {name: TASKS[name] for name in (EQUAL_1, EQUAL_4, REAL_VWS, REAL_DDP, REAL_PLAIN)}
    outcome = report(MACHINE, tasks, rounds, {REAL_PLAIN: "it broke"})
    lines = outcome.text.splitlines()

    def row(start: str) -> list[str]:
        return next(line for line in lines if line.startswith(start)).removeprefix(start).split()

    assert row(EQUAL_1) == ["180.0", "180.0", "..", "180.0", "0.90", "0.50", "1.0", "0.5000"]
    # A wave of eight takes 8 / 44.1 s, of which it waits a twentieth.
    assert row(EQUAL_4) == ["705.6", "705.6", "..", "705.6", "0.88", "0.50", "9.1", "0.05", "0.0", "0.5000"]
    assert row("b/4a")[-5:] == ["0.980", "..", "0.980", "0.97", "met"]
    assert row("p/q")[-3:] == ["0.750", "..", "0.750"]
    assert row("p/r")[-1] == "?"
    assert row(REAL_PLAIN) == ["failed"]
    assert "it broke" in outcome.text
    assert not outcome.complete


@pytest.mark.slow
def test_virtual_workers_and_ddp_train_alike() -> None:
    """One process starts the other, and each announces what it did. With one minibatch in flight, D = 0 and the mean
    of the updates, a virtual worker's step is DDP's."""
    ddp = measure(replace(TINY, variant="ddp"))
    workers = measure(replace(TINY, stages=1))
    assert ddp.notes["processes"] == workers.notes["processes"] == 2
    assert ddp.loss is not None
    assert workers.loss == pytest.approx(ddp.loss, rel=1e-5)
    assert ddp.rate > 0
    assert workers.rate > 0


@pytest.mark.slow
def test_stages_of_virtual_workers_are_padded() -> None:
    task = replace(TINY, in_flight=4, pads=((0.002, 0.004), (0.003, 0.005)))
    found = measure(task)
    assert found.notes["processes"] == 2
    assert found.notes["passes"] == 2 * 2 * (task.total - 1)  # all minibatches but the watched one, of two stages
