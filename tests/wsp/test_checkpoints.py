"""A checkpoint of several virtual workers is a cut (law L6), and a run goes on from it with any number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import oracle
from tests.oracle import State
from tests.wsp.launch import Job, run_all
from tests.wsp.test_exact import all_batches, check, expected, together
from tests.wsp.worker import Evaluated, task_of

Found = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Job, Found]:
    """Two runs that save: with dropout, in waves that a cut ends early; with BatchNorm, where one VW has less data."""
    words = Job(tmp_path_factory.mktemp("words"), "transformer", (6, 6), more={"saves": {"every_n_train_steps": 3}})
    images = Job(tmp_path_factory.mktemp("images"), "resnet", (5, 4), in_flight=2)
    images.more = {"saves": {"every_n_train_steps": 2}, "trainer": {"max_epochs": 1}, "wsp": {"wave": 3}}
    return words, images, run_all(words, images)


def test_checkpoints_are_cuts(launched: tuple[Job, Job, Found]) -> None:
    words, images, found = launched
    for job, each, runs, steps in (
        (words, found[0], expected(words, 3, cuts=[3, 6]), [3, 6, 9, 12]),
        (images, found[1], expected(images, 3, 1, cuts=[2, 4]), [2, 4]),
    ):
        check(job, each, runs)
        assert sorted(job.folder.glob("*.ckpt")) == sorted(job.folder / f"step={step}.ckpt" for step in steps)
        for step in steps:
            check_checkpoint(job.folder / f"step={step}.ckpt", runs[0].states[step])


def check_checkpoint(path: Path, state: State) -> None:
    """The checkpoint holds ``state`` of virtual worker 0 after a cut, bit for bit."""
    saved = torch.load(path, weights_only=False)
    found = oracle.difference({**state.weights, **state.buffers}, dict(saved["state_dict"]), path.name)
    assert found is None, found
    found = oracle.difference(state.optimizer, saved["optimizer_states"][0], path.name)
    assert found is None, found


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "stages", "in_flight"), [(2, [1, 3], 2), (3, 2, 4), (1, 3, 3)])
def test_resuming(
    launched: tuple[Job, Job, Found], tmp_path: Path, workers: int, stages: int | list[int], in_flight: int
) -> None:
    """From a checkpoint of two, of mid-epoch and of its end: two of other k and Nm, three, or one go on."""
    words, _, _ = launched
    jobs = []
    for step in (3, 6):
        job = Job(tmp_path / str(step), "transformer", (6,) * workers, stages, in_flight)
        job.folder.mkdir()
        job.more = {"resume": str(words.folder / f"step={step}.ckpt")}
        jobs.append(job)
    for job, step, found in zip(jobs, (3, 6), run_all(*jobs), strict=True):
        check_resumed(job, step, found)


@pytest.mark.slow
def test_two_resume_from_one(tmp_path: Path) -> None:
    """And a plain module, in no Trainer, loads what the two have saved."""
    alone = Job(tmp_path / "alone", "resnet", (4,), 2, 2)
    alone.more = {"saves": {"every_n_train_steps": 4}, "trainer": {"max_epochs": 1}}
    both = Job(tmp_path / "both", "resnet", (4, 4), 2, 3)
    both.more = {"saves": {"every_n_epochs": 1}, "resume": str(alone.folder / "step=4.ckpt")}
    alone.folder.mkdir()
    both.folder.mkdir()
    run_all(alone)
    check_resumed(both, 4, run_all(both)[0])
    last = both.folder / "step=8.ckpt"
    module = Evaluated.load_from_checkpoint(last, task=task_of("resnet", 5), weights_only=False)
    for name, tensor in torch.load(last, weights_only=False)["state_dict"].items():
        assert torch.equal(module.state_dict()[name], tensor), name


def check_resumed(job: Job, step: int, found: list[dict[str, Any]]) -> None:
    """``job`` has gone on as the oracle does that starts from its checkpoint, ``step`` minibatches on."""
    saved = torch.load(job.more["resume"], weights_only=False)
    module = Evaluated(task_of(job.task, 0))
    module.load_state_dict(saved["state_dict"])
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    state = State(weights, dict(module.named_buffers()), saved["optimizer_states"][0])
    done = step % job.lengths[0]
    # An ordinary loader starts again from its first batch when an epoch is resumed in the middle.
    data = [[batches[: len(batches) - done], batches] if done else [batches] for batches in all_batches(job)]
    check(job, found, together(job, job.in_flight, data, resumed=(step, state)))
