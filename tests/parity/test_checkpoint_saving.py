"""A checkpoint is of one step, wherever it is saved and whenever it is written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_hetpipe.errors import SettingError
from tests.exact.pipelines import delayed, even
from tests.exact.running import expect, fit
from tests.oracle import Batch, Outputs
from tests.parity.test_checkpoints import LENGTH, At, Shuffled, make, strategy
from tests.support.equality import assert_same
from tests.support.models import Task, vectors
from tests.support.trainers import quiet_trainer


class Saves(Task):
    """Saves a checkpoint in its fourth step."""

    path: Path

    def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
        if batch_idx == 3:
            assert self.trainer is not None
            self.trainer.save_checkpoint(self.path)
        return super().training_step(batch, batch_idx)


def test_training_step_saves_no_checkpoint_ahead_of_the_loop(tmp_path: Path) -> None:
    """There it would hold weights and counters of different steps, and did, without a word."""
    task = Saves(make().net)
    task.path = tmp_path / "saved.ckpt"
    with pytest.raises(SettingError, match="save it in on_train_batch_end, or set in_flight=1"):
        fit(task, vectors(26, 4), strategy=strategy(3))
    assert not task.path.exists()

    found = []
    for chosen in ("auto", strategy(1), even(7, 1, 1)):
        task = Saves(make().net)
        task.path = tmp_path / "saved.ckpt"
        fit(task, vectors(26, 4), strategy=chosen, max_epochs=1)
        found.append(torch.load(task.path))
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


class SavesEverywhere(L.Callback):
    """Saves a checkpoint in every hook of minibatch ``p`` that Lightning's loop runs."""

    def __init__(self, folder: Path, p: int) -> None:
        self.folder = folder
        self.p = p

    def save(self, trainer: L.Trainer, hook: str) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.p:
            trainer.save_checkpoint(self.folder / f"{hook}.ckpt")

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.save(trainer, "on_train_batch_start")

    def on_before_backward(self, trainer: L.Trainer, *args: Any) -> None:
        self.save(trainer, "on_before_backward")

    def on_after_backward(self, trainer: L.Trainer, *args: Any) -> None:
        self.save(trainer, "on_after_backward")

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        self.save(trainer, "on_before_optimizer_step")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.save(trainer, "on_train_batch_end")

    def on_validation_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.save(trainer, "on_validation_start")


@pytest.mark.parametrize("in_flight", [1, 4])
def test_callbacks_save_step_p_wherever_they_do(tmp_path: Path, in_flight: int) -> None:
    p = 3
    expected = expect(make(), vectors(26, 4), in_flight, max_epochs=1)
    for name, chosen in (("plain", "auto"), ("ours", delayed(strategy(in_flight), seed=2))):
        callbacks = [SavesEverywhere(tmp_path / name, p)]
        data: Any = Shuffled()
        data.batches = list(vectors(26, 4))
        data.order = lambda epoch: list(range(LENGTH))
        fit(
            make(),
            data,
            callbacks,
            val_loader=vectors(6, 4),
            strategy=chosen,
            max_epochs=1,
            val_check_interval=p,
        )
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert len(files) == 6
    for name in files:
        plain, ours = torch.load(tmp_path / "plain" / name), torch.load(tmp_path / "ours" / name)
        version = p if name.startswith(("on_train_batch_end", "on_validation_start")) else p - 1
        state = expected.states[version]
        assert_same(state.weights, dict(ours["state_dict"]), name)
        assert_same(state.optimizer, ours["optimizer_states"][0], name)
        for part in ("epoch", "global_step", "loops", "lr_schedulers", "callbacks"):
            assert_same(plain[part], ours[part], f"{name}: {part}")


class Held(TorchCheckpointIO):
    """Writes once it is let to."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        assert self.go.wait(100)
        super().save_checkpoint(*args, **kwargs)


@pytest.mark.parametrize("in_flight", [1, 4])
def test_a_checkpoint_that_is_written_later_is_of_its_step(tmp_path: Path, in_flight: int) -> None:
    """An asynchronous plugin writes it while training goes on."""
    expected = expect(make(), Shuffled.epochs(2), in_flight, max_epochs=2)
    held = Held()
    saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=3)
    let = At(2 * LENGTH, lambda trainer: held.go.set())
    fit(
        make(),
        Shuffled(),
        [saver, let],
        strategy=strategy(in_flight),
        plugins=[AsyncCheckpointIO(held)],
        enable_checkpointing=True,
    )
    for p in (3, 6, 9, 12):
        saved = torch.load(tmp_path / f"step={p}.ckpt")
        state = expected.states[p]
        assert_same(state.weights, dict(saved["state_dict"]), f"weights {p}")
        assert_same(state.optimizer, saved["optimizer_states"][0], f"optimizer {p}")
        assert saved["global_step"] == p


class Dies(TorchCheckpointIO):
    """Fails in the middle of writing."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        class Bad:
            def __reduce__(self) -> Any:
                raise OSError("the disk is full")

        super().save_checkpoint({**checkpoint, "last": Bad()}, path, storage_options)


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    trainer = quiet_trainer(strategy(3))
    trainer.fit(make(), vectors(26, 4))
    trainer.save_checkpoint(path)
    before = path.read_bytes()
    again = quiet_trainer(strategy(3), callbacks=[At(4, lambda t: t.save_checkpoint(path))], plugins=[Dies()])
    with pytest.raises(OSError, match="the disk is full"):
        again.fit(make(), vectors(26, 4))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["saved.ckpt"]
