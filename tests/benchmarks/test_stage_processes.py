"""The comparison of stages as processes with processes that share nothing."""

from dataclasses import replace

import pytest

from benchmarks.harness import Measurement
from benchmarks.stage_processes import (
    INDEPENDENT,
    ONE_THREAD,
    PROCESSES,
    THREADS,
    VARIANTS,
    Round,
    compare,
    jobs,
    report,
)
from benchmarks.training_task import Task

TINY = Task("plain", layers=4, width=8, batch=8, warmup=2, steps=3, tail=1)
MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}


def measured(rate: float, cores: float = 2.0) -> dict[str, Measurement]:
    return {"one": Measurement("one", rate, cores=cores, threads=1, loss=0.5)}


@pytest.mark.slow
def test_all_variants_train() -> None:
    found = {variant: [*job().values()] for variant, job in jobs(TINY).items()}
    assert [*found] == [*VARIANTS]
    (threads,), (processes,), (plain,) = found[THREADS], found[PROCESSES], found[ONE_THREAD]
    assert plain.loss is not None
    assert threads.loss == processes.loss


def test_ratios_are_formed_within_rounds_of_one_model() -> None:
    rounds: list[Round] = [
        {("gpt", PROCESSES): measured(9.0), ("gpt", INDEPENDENT): measured(10.0)},
        {("gpt", PROCESSES): measured(19.0), ("gpt", INDEPENDENT): measured(20.0)},
        {("gpt", PROCESSES): measured(1.0), ("mlp", INDEPENDENT): measured(20.0)},
    ]
    spread = compare(rounds, "gpt", PROCESSES, INDEPENDENT)
    assert spread is not None
    assert (spread.median, spread.low, spread.high) == pytest.approx((0.925, 0.9, 0.95))
    assert compare(rounds, "mlp", PROCESSES, INDEPENDENT) is None


def test_the_report_says_what_a_minibatch_costs_and_what_failed() -> None:
    rounds: list[Round] = [{("bert", PROCESSES): measured(19.2, 1.92), ("bert", INDEPENDENT): measured(20.0)}]
    outcome = report(MACHINE, rounds, {"BERT: two stages, threads": "it broke"})
    lines = outcome.text.splitlines()
    row = next(line for line in lines if line.startswith(f"BERT, {PROCESSES}"))
    assert row.split()[-5:] == ["19.20", "..", "19.20", "1.92", "100"]
    ratio = next(line for line in lines if line.startswith("processes over independent ones, BERT"))
    assert ratio.split()[-2:] == ["0.95", "met"]
    assert "it broke" in outcome.text
    assert not outcome.complete
    assert replace(outcome, complete=True).figures[0].spread is None  # of a model that was not measured
