"""The benchmark of compiled layers: each model trains both ways, and the table says what it brings and takes."""

from dataclasses import replace

import pytest

from benchmarks.compile import measure, report, seconds, tasks, variant
from benchmarks.harness import Measurement, Options
from benchmarks.training_task import Task
from lightning_hetpipe.torch_private.graphs import cpp_compiler_error

TINY = Task("strategy", layers=4, width=8, batch=8, warmup=4, steps=4, tail=4, in_flight=2, stages=2)
MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}
COMPILED = replace(TINY, compile=True)


def measured(rate: float, seconds: list[float]) -> Measurement:
    return Measurement("strategy", rate, cores=1.0, threads=1, loss=0.5, notes={"compile_s": seconds})


@pytest.mark.slow
def test_both_train_alike() -> None:
    if (reason := cpp_compiler_error()) is not None:
        pytest.skip(f"torch's inductor needs a C++ compiler: {reason}")
    plain, compiled = measure(TINY), measure(COMPILED)
    assert plain.loss == pytest.approx(compiled.loss, rel=1e-3)
    assert seconds([plain]).high == 0 < seconds([compiled]).low


def test_the_table_compares_within_rounds() -> None:
    rounds = [
        {variant(TINY): measured(10.0, [0.0, 0.0]), variant(COMPILED): measured(12.0, [20.0, 10.0])},
        {variant(TINY): measured(20.0, [0.0, 0.0]), variant(COMPILED): measured(28.0, [2.0, 2.0])},
    ]
    outcome = report(MACHINE, [TINY], rounds, {})
    assert [figure.cells()[:2] for figure in outcome.figures] == [("1.30", "1.20 .. 1.40"), ("17.0", "4.0 .. 30.0")]
    assert outcome.complete


def test_a_variant_that_fails_is_said_to() -> None:
    outcome = report(MACHINE, [TINY], [{variant(TINY): measured(10.0, [0.0])}], {variant(COMPILED): "no luck"})
    assert not outcome.complete
    assert f"failed: {variant(COMPILED)}\nno luck" in outcome.text


@pytest.mark.parametrize(("quick", "models"), [(False, ["mlp", "resnet", "gpt"]), (True, ["mlp"])])
def test_each_model_is_measured(quick: bool, models: list[str]) -> None:
    found = tasks(Options(quick=quick, rounds=1), (0, 1))
    assert [task.model for task in found] == models
    assert {task.stages for task in found} == {2}
