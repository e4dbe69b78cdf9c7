"""The benchmark of recomputation: both variants train the same, and the table says what is saved and what it costs."""

from dataclasses import replace

import pytest

from benchmarks.harness import Measurement
from benchmarks.recompute import AGAIN, KEPT, activations, measure, report
from benchmarks.training_task import Task

TINY = Task("strategy", layers=4, width=8, batch=8, warmup=4, steps=4, tail=4, in_flight=2, stages=2)
MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}


def measured(rate: float, held: list[int]) -> Measurement:
    return Measurement("strategy", rate, cores=1.0, threads=1, loss=0.5, notes={"activations_bytes": held})


@pytest.mark.slow
def test_both_train_the_same() -> None:
    again = measure(replace(TINY, recompute=True))
    kept = measure(TINY)
    assert again.loss == kept.loss is not None
    assert len(activations(again)) == len(activations(kept)) == 2
    assert all(activations(again))


def test_the_table_compares_within_rounds() -> None:
    rounds = [
        {KEPT: measured(10.0, [2**22, 2**20]), AGAIN: measured(8.0, [2**20, 2**20])},
        {KEPT: measured(20.0, [2**22, 2**20]), AGAIN: measured(16.0, [2**20, 2**20])},
    ]
    outcome = report(MACHINE, TINY, rounds, {})
    lines = outcome.text.splitlines()
    assert any(line.split()[-5:] == ["..", "20.00", "4.0", "1.0", "5.0"] for line in lines)
    assert [figure.cells()[0] for figure in outcome.figures] == ["0.80", "0.40"]
    assert outcome.complete


def test_a_variant_that_fails_is_said_to() -> None:
    outcome = report(MACHINE, TINY, [{KEPT: measured(10.0, [4, 4])}], {AGAIN: "no luck"})
    assert not outcome.complete
    assert f"failed: {AGAIN}\nno luck" in outcome.text
