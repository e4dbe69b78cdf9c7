"""Whatever is wrong with the checkpoint to resume from is said in one sentence; a bug in a user's hook is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Ends, Train
from tests.support.marks import quick

MINE = ["--config-dir", "mine", "experiment=mine", "trainer.enable_progress_bar=false"]


@pytest.fixture
def checkpoint(train: Train, folder: Path) -> Path:
    """Checkpoint of one epoch of the user's model."""
    train(*MINE, "hydra.run.dir=first")
    (found,) = folder.glob("first/checkpoints/*.ckpt")
    return found.rename(folder / "good.ckpt")


def refused(ends: Ends, *arguments: str) -> str:
    _, error = ends(2, *MINE, *arguments)
    assert "Traceback" not in error
    return error.splitlines()[-2].removeprefix("hetpipe-train: ")


@quick("hello\\n")
@pytest.mark.parametrize("content", [b"", b"hello\n", b"# not a checkpoint, but Python\n"])
def test_a_file_that_is_no_checkpoint(ends: Ends, folder: Path, content: bytes) -> None:
    (folder / "bad.ckpt").write_bytes(content)
    said = refused(ends, "ckpt_path=bad.ckpt")
    assert said.startswith("ckpt_path=bad.ckpt cannot be restored (torch cannot read it, ")
    assert said.endswith("; give a checkpoint of this model and this trainer, or ckpt_path=null to begin anew.")


def test_a_folder(ends: Ends) -> None:
    assert "ckpt_path=mine cannot be restored (IsADirectoryError" in refused(ends, "ckpt_path=mine")


def test_a_checkpoint_of_another_model(ends: Ends, checkpoint: Path) -> None:
    said = refused(ends, f"ckpt_path={checkpoint.name}", "model.width=4")
    assert said.startswith(
        "ckpt_path=good.ckpt cannot be restored (RuntimeError: Error(s) in loading state_dict for Model"
    )
    assert len(said) < 500


def test_a_checkpoint_without_optimizer_state(ends: Ends, checkpoint: Path) -> None:
    content = torch.load(checkpoint, weights_only=False)
    del content["optimizer_states"]
    torch.save(content, checkpoint)
    assert "Trying to restore optimizer state but checkpoint contains only the model" in refused(
        ends, f"ckpt_path={checkpoint.name}", "trainer.max_epochs=2"
    )


def test_a_checkpoint_with_objects_says_how_to_read_it(ends: Ends, checkpoint: Path) -> None:
    content = torch.load(checkpoint, weights_only=False)
    torch.save({**content, "object": Path("x")}, checkpoint)
    said = refused(ends, f"ckpt_path={checkpoint.name}")
    assert said.startswith("ckpt_path=good.ckpt holds a pathlib.")
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1" in said


def test_a_checkpoint_beyond_the_end_names_the_setting_that_says_the_end(
    train: Train, ends: Ends, folder: Path
) -> None:
    train(*MINE, "trainer.max_epochs=3", "hydra.run.dir=first")
    (found,) = folder.glob("first/checkpoints/*.ckpt")
    said = refused(ends, f"ckpt_path={found}", "trainer.max_epochs=1")
    assert said.startswith("trainer.max_epochs=1: You restored a checkpoint with current_epoch=2")


def test_a_bug_in_a_hook_that_restores_keeps_its_traceback(ends: Ends, checkpoint: Path, folder: Path) -> None:
    (folder / "hooked.py").write_text(
        "import users_model\n\n\n"
        "class Model(users_model.Model):\n"
        "    def on_load_checkpoint(self, checkpoint):\n"
        "        raise KeyError('a bug')\n"
    )
    _, error = ends(1, *MINE, "model._target_=hooked.Model", f"ckpt_path={checkpoint.name}", "trainer.max_epochs=2")
    assert "raise KeyError('a bug')" in error
