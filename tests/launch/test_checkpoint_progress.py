"""The checkpoint with the most progress is found by contents, not by the times of files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hetpipe.launch.supervision import Progress, furthest, progress_of
from tests.support.models import mlp, vectors
from tests.support.trainers import quiet_trainer


class Foreign:
    """A class that who reads a checkpoint need not know."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("its code runs",)


def saved(path: Path, epoch: int, batches: int, between: bool = False, **more: Any) -> str:
    """Write a file with the parts of a Lightning checkpoint that say how far its run had come."""
    begun = {"ready": epoch + 1 - between}
    loop = {"epoch_progress": {"current": begun}, "epoch_loop.batch_progress": {"current": {"processed": batches}}}
    content = {"epoch": epoch, "global_step": 8 * epoch + batches, "loops": {"fit_loop": loop}, **more}
    torch.save({**content, "state_dict": {"weight": torch.ones(3)}, "hyper_parameters": Foreign()}, path)
    return str(path)


def test_it_is_read_from_what_lightning_saves(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, "{epoch}-{step}", save_top_k=-1, every_n_train_steps=3)
    ends = ModelCheckpoint(tmp_path, "end-{epoch}-{step}", save_top_k=-1)
    trainer = quiet_trainer("auto", max_epochs=2, callbacks=[saves, ends], enable_checkpointing=True)
    trainer.fit(mlp(), vectors(4 * 5, 4, seed=0))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    found = {path.stem: progress_of(path) for path in tmp_path.glob("*.ckpt")}
    assert found == {
        "epoch=0-step=3": Progress(0, 3, 3),
        "end-epoch=0-step=5": Progress(0, 5, 5),
        "epoch=1-step=6": Progress(1, 1, 6),
        "epoch=1-step=9": Progress(1, 4, 9),
        "end-epoch=1-step=10": Progress(1, 5, 10),
        "last": Progress(2, 0, 10),
    }


def test_one_that_was_late_to_save_is_not_taken(tmp_path: Path) -> None:
    ahead = saved(tmp_path / "ahead.ckpt", 2, 6, hetpipe={"wave": 2})
    straggler = saved(tmp_path / "straggler.ckpt", 2, 8, hetpipe={"wave": 4})
    earlier = saved(tmp_path / "earlier.ckpt", 2, 14, between=True)
    assert [progress_of(each).waves for each in (ahead, straggler, earlier)] == [3, 2, 0]
    assert furthest([ahead, straggler, earlier]) == ahead
    again = saved(tmp_path / "again.ckpt", 2, 6, hetpipe={"wave": 2})
    assert furthest([ahead, again]) == again


def test_what_cannot_be_read_is_only_taken_where_there_is_nothing_else(tmp_path: Path) -> None:
    other = tmp_path / "other.ckpt"
    other.write_text("of a plugin of somebody's")
    assert furthest([str(other), str(tmp_path / "removed.ckpt")]) == str(other)
    known = saved(tmp_path / "known.ckpt", 0, 1)
    assert furthest([known, str(other)]) == known
    assert furthest([]) is None


def test_a_loop_asks_for_it(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "lightning_hetpipe.cli.newest_checkpoint", str(tmp_path)]
    assert subprocess.run(program, capture_output=True, text=True, check=True).stdout == ""
    ahead, straggler = saved(tmp_path / "ahead.ckpt", 1, 4), saved(tmp_path / "straggler.ckpt", 1, 2)
    os.utime(ahead, (1, 1))
    assert os.path.getmtime(straggler) > os.path.getmtime(ahead)
    assert subprocess.run(program, capture_output=True, text=True, check=True).stdout == f"{ahead}\n"
