"""Checkpoints in mid-epoch are exact at minibatch p, and a resumed run starts empty there (laws L1, L9)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader

from lightning_hetpipe import HetPipeStrategy
from tests.exact.pipelines import even
from tests.exact.running import Record, after, assert_equal, expect, fit
from tests.oracle import Recipe
from tests.support.equality import assert_same
from tests.support.marks import quick, slow_except
from tests.support.models import ADAMW, Task, convnet, decay, images, recurring, resnet, sgd, vectors

RECIPE = Recipe(sgd, decay)
LENGTH = 5  # batches of an epoch


def loader() -> DataLoader[Any]:
    return images(18, 4)


def save(task: Task, folder: Path, data: Any, strategy: Strategy | str, **when: Any) -> dict[int, Any]:
    """Fits, and returns the checkpoints by their step."""
    saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, **when)
    fit(task, data, [saver], strategy=strategy, enable_checkpointing=True)
    checkpoints = [torch.load(path, weights_only=False) for path in folder.iterdir()]
    return {checkpoint["global_step"]: checkpoint for checkpoint in checkpoints}


@quick("4")
@pytest.mark.parametrize("in_flight", [1, 4])
def test_checkpoints_in_mid_epoch_are_the_oracles(tmp_path: Path, in_flight: int) -> None:
    task, start = convnet(RECIPE), convnet(RECIPE)
    start.load_state_dict(task.state_dict())
    expected = expect(task, loader(), in_flight)
    plain = save(start, tmp_path / "plain", loader(), "auto", every_n_train_steps=3)
    ours = save(task, tmp_path / "ours", loader(), even(9, 3, in_flight), every_n_train_steps=3)
    assert sorted(ours) == [3, 6, 9]
    for p, checkpoint in ours.items():
        state = expected.states[p]
        assert_same({**state.weights, **state.buffers}, dict(checkpoint["state_dict"]), f"weights at {p}")
        assert_same(state.optimizer, checkpoint["optimizer_states"][0], f"optimizer at {p}")
        # The counters of loops and schedulers know of no pipeline.
        for part in ("epoch", "loops", "lr_schedulers"):
            assert_same(plain[p][part], checkpoint[part], f"{part} at {p}")


@quick("5-4")
@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("p", slow_except([3, 5, 7], 5))
def test_resuming_is_starting_empty(tmp_path: Path, p: int, in_flight: int) -> None:
    task = resnet(RECIPE)
    # An ordinary loader starts again from its first batch when an epoch is resumed in the middle: Lightning says so.
    batches, done = list(loader()), p % LENGTH
    epochs = [batches, batches, batches]
    epochs[p // LENGTH] = batches[:done] + batches[: LENGTH - done]
    expected = expect(task, epochs, in_flight, restarts={p})
    when = {"every_n_epochs": 1} if p == LENGTH else {"every_n_train_steps": p}
    save(task, tmp_path, loader(), even(9, 3, in_flight), **when)
    record = resume(tmp_path / name_of(p), even(9, 2, in_flight), task=resnet(RECIPE))
    assert_equal(after(expected, p), record)


def test_another_number_in_flight_than_the_checkpoints_is_warned_of(tmp_path: Path) -> None:
    """Results depend on it, and a plan may decide on another one than before."""
    save(convnet(RECIPE), tmp_path, loader(), even(9, 3, 4), every_n_train_steps=3)

    def warned(**asked: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resume(tmp_path / name_of(9), HetPipeStrategy(**asked))
        return [str(each.message) for each in caught if "is resumed with" in str(each.message)]

    said = (
        "the checkpoint was trained with 4 in flight and is resumed with {}, on which results depend; set in_flight=4"
    )
    assert [each.partition(" to go on")[0] for each in warned(stages=2)] == [said.format(3)]
    assert [each.partition(" to go on")[0] for each in warned()] == [said.format(1)]
    assert warned(stages=3) == []
    assert warned(stages=2, in_flight=2) == []


def resume(checkpoint: Path, strategy: Strategy | str, data: Any = None, task: Task | None = None) -> Record:
    """Resumes in a fresh model, which knows nothing of the first run."""
    task = task or convnet(RECIPE)
    return fit(task, data or loader(), strategy=strategy, ckpt_path=str(checkpoint), max_epochs=3)


def name_of(p: int) -> str:
    return f"step={p}.ckpt"


@pytest.mark.slow  # tests/parity/test_checkpoints.py resumes across strategies
def test_from_a_plain_run_to_a_pipeline_and_back(tmp_path: Path) -> None:
    task = convnet(RECIPE)
    there = expect(task, loader(), [1, 4, 4], max_epochs=3)
    back = expect(task, loader(), [4, 1, 1], max_epochs=3)
    start = convnet(RECIPE)
    start.load_state_dict(task.state_dict())
    save(start, tmp_path / "plain", loader(), "auto", every_n_epochs=1)
    assert_equal(after(there, LENGTH), resume(tmp_path / "plain" / name_of(LENGTH), even(9, 3, 4)))
    save(task, tmp_path / "ours", loader(), even(9, 3, 4), every_n_epochs=1)
    assert_equal(after(back, LENGTH), resume(tmp_path / "ours" / name_of(LENGTH), "auto"))


def test_a_resumed_run_draws_the_random_numbers_of_its_minibatches(tmp_path: Path) -> None:
    task, data = recurring(ADAMW), vectors(18, 4)  # with dropout
    L.seed_everything(5)
    expected = expect(task, data, 3, max_epochs=3, restarts={LENGTH})
    save(task, tmp_path, data, even(8, 3, 3), every_n_epochs=1)
    record = resume(tmp_path / name_of(LENGTH), even(8, 2, 3), data, recurring(ADAMW))
    assert_equal(after(expected, LENGTH), record)


class Resumable:
    """A loader that can be saved and resumed in the middle of an epoch."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        # A resumed epoch goes on; one that was over starts anew.
        self.given %= len(self.batches)
        while self.given < len(self.batches):
            self.given += 1
            yield self.batches[self.given - 1]

    def __len__(self) -> int:
        return len(self.batches)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


@quick("4")
@pytest.mark.parametrize("in_flight", [1, 4])
def test_a_resumable_loader_is_saved_at_its_minibatch(tmp_path: Path, in_flight: int) -> None:
    """Up to three batches more were fetched when the checkpoint was written: they are not lost."""
    task, batches, p = convnet(RECIPE), list(loader()), 3
    expected = expect(task, [batches] * 3, in_flight, restarts={p})
    ours = save(task, tmp_path, Resumable(batches), even(9, 3, in_flight), every_n_train_steps=p)
    assert ours[p]["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [{"given": p}]
    record = resume(tmp_path / name_of(p), even(9, 2, in_flight), Resumable(batches))
    assert_equal(after(expected, p), record)


def test_a_checkpoint_loads_without_lightning_or_us(tmp_path: Path) -> None:
    task = convnet(RECIPE)
    expected = expect(task, loader(), 4)
    save(task, tmp_path, loader(), even(9, 3, 4), every_n_epochs=1)
    loaded = Loadable.load_from_checkpoint(tmp_path / name_of(2 * LENGTH), weights_only=False)
    state = expected.states[-1]
    assert_same({**state.weights, **state.buffers}, dict(loaded.state_dict()), "loaded")


class Loadable(Task):
    def __init__(self) -> None:
        super().__init__(convnet().net, RECIPE)
