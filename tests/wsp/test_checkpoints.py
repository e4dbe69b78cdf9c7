"""A checkpoint of several virtual workers is a cut (law L6), and a run goes on from it with any number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle import State
from tests.support.equality import assert_same
from tests.wsp.launch import Job, run_all
from tests.wsp.test_exact import all_batches, check, expected, together
from tests.wsp.worker import Evaluated, task_of

Found = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Job, Found]:
    """Two runs that save: with dropout, in waves that a cut ends early; with BatchNorm, where one VW has less data.

    And a third, which goes on from the end of the first one's first epoch, with modules that are on meta until then.
    """
    words = Job(tmp_path_factory.mktemp("words"), "transformer", (6, 6))
    words.more = {"saves": {"every_n_train_steps": 3}, "even": True}
    images = Job(tmp_path_factory.mktemp("images"), "resnet", (5, 4), in_flight=2)
    images.more = {"saves": {"every_n_train_steps": 2}, "trainer": {"max_epochs": 1}, "wsp": {"wave": 3}}
    again = Job(tmp_path_factory.mktemp("again"), "transformer", (6, 6))
    again.more = {**words.more, "resume": str(words.folder / "step=6.ckpt"), "on_meta": True}
    return words, images, run_all(words, images, again)


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
    assert_same({**state.weights, **state.buffers}, dict(saved["state_dict"]), path.name)
    assert_same(state.optimizer, saved["optimizer_states"][0], path.name)


def test_a_resumed_run_is_the_uninterrupted_one(launched: tuple[Job, Job, Found]) -> None:
    """All went on with the moments of virtual worker 0's AdamW."""
    words, _, (found, _, again) = launched
    # A cut in mid-epoch differs: there the uninterrupted run has minibatches in flight. The resumed one has it as well.
    check_same_end(found, again)
    saved = torch.load(words.folder / "step=12.ckpt", weights_only=True)  # only tensors, and plain values
    assert saved["hetpipe"]["states"].keys() == {1}


def check_same_end(found: list[dict[str, Any]], again: list[dict[str, Any]]) -> None:
    """Every virtual worker has ended with the same weights and buffers, and its optimizer in the same state."""
    for worker, (one, other) in enumerate(zip(found, again, strict=True)):
        rest = len(other["outputs"])
        assert 0 < rest < len(one["outputs"])
        parts = ((one["outputs"][-rest:], other["outputs"]), (one["end"], other["end"]))
        for whole, resumed in parts:
            assert_same(whole, resumed, f"VW {worker}")


LENGTHS = (5, 3, 4)
"""Batches of virtual workers: they have taken different numbers of steps, at different learning rates."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_run_resumed_at_an_epochs_end_is_the_uninterrupted_one(tmp_path: Path, workers: int) -> None:
    """SGD with momentum and AdamW in two groups, each with a scheduler by step and by epoch; saved at the end of an
    epoch, or of its validation; with what rounding has left of updates; by a plugin that writes later."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        task: (task, {}) for task in ("by step", "by epoch", "groups by step", "groups by epoch")
    }
    if workers == 2:
        cases["rounded"] = "by step", {"wsp": {"update_dtype": "bfloat16"}}
        cases["validated"] = "resnet", {"validate": True, "trainer": {"max_epochs": 3, "num_sanity_val_steps": 0}}
        cases["averaged"] = "mlp", {"averages": 0.5}
        cases["written later"] = "mlp", {"saves_later": True}
    jobs: list[Job] = []
    for name, (task, more) in cases.items():
        for which in ("whole", "resumed"):
            job = Job(
                tmp_path / f"{name} {which}", task, LENGTHS[:workers], more={"trainer": {"max_epochs": 3}, **more}
            )
            job.more |= (
                {"saves": {"every_n_epochs": 1}}
                if which == "whole"
                else {"resume": str(jobs[-1].folder / "step=5.ckpt")}
            )
            job.folder.mkdir()
            jobs.append(job)
    found = run_all(*jobs)
    for whole, resumed in zip(found[::2], found[1::2], strict=True):
        check_same_end(whole, resumed)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "stages", "in_flight"), [(2, [1, 3], 2), (3, 2, 4), (1, 3, 3)])
def test_resuming(
    launched: tuple[Job, Job, Found], tmp_path: Path, workers: int, stages: int | list[int], in_flight: int
) -> None:
    """From a checkpoint of two, of mid-epoch and of its end: two of other k and Nm, three, or one go on.

    Two do so each from its own optimizer state, others from virtual worker 0's.
    """
    words, _, _ = launched
    runs = expected(words, 3, cuts=[3, 6])
    jobs = []
    for step in (3, 6):
        job = Job(tmp_path / str(step), "transformer", (6,) * workers, stages, in_flight)
        job.folder.mkdir()
        job.more = {"even": True, "resume": str(words.folder / f"step={step}.ckpt")}
        jobs.append(job)
    for job, step, found in zip(jobs, (3, 6), run_all(*jobs), strict=True):
        check_resumed(job, step, found, [run.states[step].optimizer for run in runs] if workers == 2 else None)


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


def check_resumed(
    job: Job, step: int, found: list[dict[str, Any]], optimizers: list[dict[str, Any]] | None = None
) -> None:
    """``job`` has gone on as the oracle does that starts from its checkpoint, ``step`` minibatches on.

    Args:
        optimizers: the states of each virtual worker's; of virtual worker 0's on all, by default.
    """
    saved = torch.load(job.more["resume"], weights_only=False)
    module = Evaluated(task_of(job.task, 0))
    module.load_state_dict(saved["state_dict"])
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    optimizers = optimizers or [saved["optimizer_states"][0]] * len(job.lengths)
    states = [(step, State(weights, dict(module.named_buffers()), optimizer)) for optimizer in optimizers]
    done = step % job.lengths[0]
    # An ordinary loader starts again from its first batch when an epoch is resumed in the middle.
    data = [[batches[: len(batches) - done], batches] if done else [batches] for batches in all_batches(job)]
    check(job, found, together(job, job.in_flight, data, resumed=states))
