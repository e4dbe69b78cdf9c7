"""Virtual workers with D = 0 train what a plain loop of the laws trains, bit for bit, run after run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import oracle
from tests.oracle import Run
from tests.support.equality import assert_same
from tests.wsp.launch import Job, run
from tests.wsp.worker import SEED, Evaluated, data_of, task_of


def expected(job: Job, wave: int, epochs: int = 2, **options: Any) -> list[Run]:
    """The oracle's run of ``job``, ``epochs`` times over the data of each virtual worker."""
    return together(job, wave, [[batches] * epochs for batches in all_batches(job)], **options)


def all_batches(job: Job) -> list[list[Any]]:
    even = job.more.get("even", False)
    return [list(data_of(job.task, i, length, even=even)) for i, length in enumerate(job.lengths)]


def together(job: Job, wave: Any, data: list[list[Any]], **options: Any) -> list[Run]:
    """The oracle's run of ``job`` on ``data``; one virtual worker alone exchanges nothing."""
    task = Evaluated(task_of(job.task, 0))
    torch.manual_seed(SEED)
    if len(data) > 1:
        return oracle.train_together(task, Evaluated.compute, data, task.recipe, job.in_flight, wave, **options)
    run = Run()
    if resumed := options.pop("resumed", None):
        options["resumed"] = resumed[0]
    for _ in oracle.minibatches(run, task, Evaluated.compute, data[0], task.recipe, job.in_flight, **options):
        pass
    return [run]


def check(job: Job, found: list[dict[str, Any]], runs: list[Run]) -> None:
    """Every minibatch's outputs, and the weights and buffers of the end, are the oracle's."""
    for worker, (each, wanted) in enumerate(zip(found, runs, strict=True)):
        assert len(each["states"]) == len(wanted.states)
        for p, (outputs, output) in enumerate(zip(wanted.outputs, each["outputs"], strict=True), start=1):
            assert_same(outputs, output, f"VW {worker}, minibatch {p}")
        last = wanted.states[-1]
        assert_same(last.weights, each["end"].weights, f"VW {worker}, end")
        assert_same(last.buffers, each["end"].buffers, f"VW {worker}, end")


BY_TWO: dict[str, Any] = {"trainer": {"accumulate_grad_batches": 2}}
CASES: dict[str, tuple[Job, int, dict[str, Any]]] = {
    "two": (Job(Path()), 3, {}),
    "one in flight": (Job(Path(), stages=1, in_flight=1), 1, {}),
    "three, unequal stages and lengths": (Job(Path(), lengths=(5, 3, 4), stages=[2, 3, 1], in_flight=2), 2, {}),
    "short waves": (Job(Path(), lengths=(5, 5), more={"wsp": {"wave": 2}}), 2, {}),
    "long waves": (Job(Path(), lengths=(5, 4), in_flight=2, more={"wsp": {"wave": 4}}), 4, {}),
    "mean": (Job(Path(), more={"wsp": {"aggregate": "mean"}}), 3, {"mean": True}),
    "batchnorm": (Job(Path(), task="resnet"), 3, {}),
    "delays": (Job(Path(), lengths=(4, 5), more={"delays": 1}), 3, {}),
    # Waves hold whole optimizer steps; what a merge has changed is no part of a prediction.
    "sync": (Job(Path(), more={**BY_TWO, "weights": "sync"}), 4, {"accumulate": 2, "weights": "sync"}),
    "2bw": (Job(Path(), in_flight=2, more={**BY_TWO, "weights": "2bw"}), 2, {"accumulate": 2, "weights": "2bw"}),
    "pipeoptim": (Job(Path(), lengths=(5, 4), more={"weights": "pipeoptim"}), 3, {"weights": "pipeoptim"}),
    "xpipe": (
        Job(Path(), lengths=(7, 6), more={**BY_TWO, "weights": "xpipe", "lr_correction": 3}),
        4,
        {"accumulate": 2, "weights": "xpipe", "lr_correction": 3},
    ),
}


@pytest.mark.slow
def test_a_validation_in_mid_epoch_sees_the_same_on_all(tmp_path: Path) -> None:
    """It is a cut; its metrics are those of all virtual workers; and training goes on from there."""
    job = Job(tmp_path, lengths=(6, 6), more={"validate": True, "trainer": {"val_check_interval": 4, "max_epochs": 1}})
    found = run(job)
    check(job, found, expected(job, 3, 1, cuts=[4]))
    one, other = found
    assert_same(one["validated"], other["validated"])
    assert len(one["validated"]) == 1
    assert one["metrics"]["count"] == 6
    for name in ("loss", "mean", "count"):
        assert one["metrics"][name] == other["metrics"][name], name
    losses = []
    for worker, each in enumerate(found):
        module = Evaluated(task_of("mlp", worker))
        module.load_state_dict(each["validated"][0])
        batches = data_of("mlp", 8 + worker, 3)
        losses += [module.eval().compute(batch)["loss"].item() for batch in batches]
    assert one["metrics"]["mean"].item() == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@pytest.mark.slow  # test_checkpoints has two launches that are compared in the same way
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name: str, tmp_path: Path) -> None:
    job, wave, options = CASES[name]
    job.folder = tmp_path
    check(job, run(job), expected(job, wave, **options))
