"""An interrupted save leaves the old checkpoint, whole, whatever interrupts it."""

from __future__ import annotations

import errno
import os
import re
import signal
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_hetpipe.strategy.checkpoints import ReplacingCheckpointIO
from tests.support.small import Learner, batches, pipeline
from tests.support.trainers import quiet_trainer


class Dies:
    """Kills the process that saves it."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "it.ckpt"
    ReplacingCheckpointIO().save_checkpoint({"step": 1}, path)
    late = {"weights": torch.ones(1000), "late": Dies()}
    killed = get_context("fork").Process(target=ReplacingCheckpointIO().save_checkpoint, args=(late, path))
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    assert torch.load(path) == {"step": 1}
    ReplacingCheckpointIO().save_checkpoint({"step": 2}, path)
    assert torch.load(path) == {"step": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["it.ckpt"]


@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["write", "replace"])
def test_a_failure_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, place: str
) -> None:
    def save(checkpoint: Any, file: Any) -> None:
        file.write(b"half of ")
        raise failure

    def replace(*_: Any) -> None:
        raise failure

    path = tmp_path / "it.ckpt"
    ReplacingCheckpointIO().save_checkpoint({"step": 1}, path)
    if place == "write":
        monkeypatch.setattr(torch, "save", save)
    else:
        monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(type(failure)):
        ReplacingCheckpointIO().save_checkpoint({"step": 2}, path)
    monkeypatch.undo()
    assert torch.load(path) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["it.ckpt"]


@pytest.mark.parametrize(("code", "advice"), [(errno.ENOSPC, "make room, or save"), (errno.EACCES, "save")])
def test_an_error_of_the_system_names_the_file_and_the_way_out(
    code: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python names no file where writing fails, and nobody knew which disk was full."""

    def save(checkpoint: Any, file: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(torch, "save", save)
    path = tmp_path / "it.ckpt"
    with pytest.raises(OSError, match=re.escape(os.strerror(code))) as caught:
        ReplacingCheckpointIO().save_checkpoint({"step": 1}, path)
    assert (caught.value.errno, caught.value.filename) == (code, str(path))
    elsewhere = f"as it was: {advice} elsewhere, by ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...)"
    assert elsewhere in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_plugins_of_the_users_stay(tmp_path: Path) -> None:
    class Mine(TorchCheckpointIO):
        pass

    mine, around = Mine(), AsyncCheckpointIO()
    for plugin in (mine, around):
        trainer = quiet_trainer(pipeline(2), plugins=[plugin])
        assert trainer.strategy.checkpoint_io is plugin
    assert isinstance(around.checkpoint_io, ReplacingCheckpointIO)


def test_the_strategy_saves_so(tmp_path: Path) -> None:
    trainer = quiet_trainer(pipeline(2))
    trainer.fit(Learner(), batches(3))
    assert isinstance(trainer.strategy.checkpoint_io, ReplacingCheckpointIO)
    trainer.save_checkpoint(tmp_path / "a" / "it.ckpt")
    assert torch.load(tmp_path / "a" / "it.ckpt", weights_only=True)["global_step"] == 3
