"""Virtual workers with D = 0 train what a plain loop of the laws trains, bit for bit, run after run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import oracle
from tests.oracle import Run
from tests.wsp.launch import Job, run
from tests.wsp.worker import Evaluated, data_of, task_of


def expected(job: Job, wave: int, epochs: int = 2, **options: Any) -> list[Run]:
    data = [[list(data_of(job.task, i, length))] * epochs for i, length in enumerate(job.lengths)]
    task = Evaluated(task_of(job.task, 0))
    in_flight = job.in_flight
    return oracle.train_together(task, Evaluated.compute, data, task.recipe, in_flight, wave, **options)


def check(job: Job, found: list[dict[str, Any]], runs: list[Run]) -> None:
    for worker, (each, wanted) in enumerate(zip(found, runs, strict=True)):
        assert len(each["states"]) == len(wanted.states)
        for p, (outputs, output) in enumerate(zip(wanted.outputs, each["outputs"], strict=True), start=1):
            assert (d := oracle.difference(outputs, output, f"VW {worker}, minibatch {p}")) is None, d


CASES: dict[str, tuple[Job, int, dict[str, Any]]] = {
    "two": (Job(Path()), 3, {}),
    "one in flight": (Job(Path(), stages=1, in_flight=1), 1, {}),
    "three, unequal stages and lengths": (Job(Path(), lengths=(5, 3, 4), stages=[2, 3, 1], in_flight=2), 2, {}),
    "short waves": (Job(Path(), lengths=(5, 5), more={"wsp": {"wave": 2}}), 2, {}),
    "long waves": (Job(Path(), lengths=(5, 4), in_flight=2, more={"wsp": {"wave": 4}}), 4, {}),
    "mean": (Job(Path(), more={"wsp": {"aggregate": "mean"}}), 3, {"mean": True}),
    "batchnorm": (Job(Path(), task="resnet"), 3, {}),
    "delays": (Job(Path(), lengths=(4, 5), more={"delays": 1}), 3, {}),
}


QUICK = "three, unequal stages and lengths"


@pytest.mark.parametrize(
    "name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES.keys() - {QUICK})]
)
def test_against_the_oracle(name: str, tmp_path: Path) -> None:
    job, wave, options = CASES[name]
    job.folder = tmp_path
    check(job, run(job), expected(job, wave, **options))
