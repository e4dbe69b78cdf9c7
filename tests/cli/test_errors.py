"""A wrong setting ends in one sentence and exit code 2, a bug in its traceback and 1, Ctrl-C in 130."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_hetpipe.errors import SettingError
from tests.cli.conftest import Ends, Train

MINE = ["--config-dir", "mine", "experiment=mine"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["strategy.in_fligt=6"], "strategy.in_fligt is not a setting; did you mean strategy.in_flight?"),
        (["+strategy.in_fligt=6"], "strategy.in_fligt is not a setting; did you mean strategy.in_flight?"),
        (["experiment=gptt"], "experiment=gptt does not exist among digits, gpt; did you mean experiment=gpt?"),
        (["experiment=zzz"], "experiment=zzz does not exist among digits, gpt; choose one of them."),
        (["modle=resnet"], "modle is not a setting; did you mean model?"),
        (["sead=3"], "sead is not a setting; did you mean seed?"),
        (["experimnt=gpt"], "experimnt is not a setting; did you mean experiment?"),
        (["model.width=${nowhere}"], "model.width: Interpolation key 'nowhere' not found"),
        (["model._target_=no_such.Model"], "model._target_=no_such.Model cannot be found"),
        (["strategy.stages=[1"], "strategy.stages=[1 cannot be read; write section.key=value"),
        (["--config-dir", "nowhere"], "Additional config directory"),
        (["experiment=null"], "Config group override must be a string or a list"),
        (["trainer.accelerator=abacus"], "trainer: You selected an invalid accelerator name: `accelerator='abacus'`"),
        (["trainer.max_epochs=abc"], "trainer.max_epochs=abc must be a whole number or null."),
        (["data.batch_size=abc"], "data.batch_size=abc must be a whole number."),
        (["data.batch_size=0"], "batch_size=0 must be at least 1"),
        (["experiment=gpt", "model.heads=5"], "width=96 must be a multiple of heads=5"),
        (["strategy.stages=two"], "strategy.stages=two must be a whole number or 'auto'."),
        (["seed=abc"], "seed=abc must be a whole number or null."),
        (["ckpt_path=nowhere.ckpt"], "ckpt_path=nowhere.ckpt does not exist; give the path of a checkpoint"),
        (["trainer.max_epochs=-5"], "`max_epochs` must be a non-negative integer or -1. You passed in -5."),
    ],
)
def test_a_wrong_setting_is_one_sentence(ends: Ends, arguments: list[str], said: str) -> None:
    _, error = ends(2, *arguments)
    assert error.startswith(f"hetpipe-train: {said}")
    assert error.splitlines()[1:] == ["(HYDRA_FULL_ERROR=1 shows where it was raised.)"]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("trainer.logger.save_dirr=x", "save_dirr is not a setting; did you mean trainer.logger.save_dir?"),
        (
            "trainer.logger.foo=x",
            "foo is not a setting; lightning.pytorch.loggers.TensorBoardLogger has save_dir, name",
        ),
    ],
)
def test_an_argument_that_is_passed_on_and_refused_there_is_one_sentence(ends: Ends, argument: str, said: str) -> None:
    """The logger takes any argument, for the writer that it makes when training starts."""
    _, error = ends(2, *MINE, argument)
    assert f"hetpipe-train: trainer.logger.{said}" in error
    assert "Traceback" not in error


def test_an_error_begins_on_a_line_of_its_own(ends: Ends) -> None:
    """Not behind a progress bar, and no bar is drawn after it."""
    output, error = ends(2, *MINE, "strategy.stages=50")
    assert "Epoch 0" in output
    said, hint = error.splitlines()[-2:]
    assert said.startswith("hetpipe-train: stages=50 is more than the 3 layers")
    assert hint == "(HYDRA_FULL_ERROR=1 shows where it was raised.)"


@pytest.mark.parametrize(
    ("switch", "missing"),
    [
        ("trainer.enable_progress_bar=false", "Epoch 0"),
        ("trainer.logger=false", "tensorboard --logdir"),
        ("trainer.enable_checkpointing=false", ".ckpt"),
    ],
)
def test_the_trainers_switches_hold_for_the_callbacks_of_the_configuration(
    train: Train, capsys: pytest.CaptureFixture[str], switch: str, missing: str
) -> None:
    """Lightning refuses them beside a callback of that kind, and the configuration lists one."""
    train(*MINE)
    assert missing in "".join(capsys.readouterr())
    train(*MINE, switch)
    shown = "".join(capsys.readouterr())
    assert "samples per second" in shown
    assert missing not in shown


@pytest.mark.parametrize("override", ["strategy.in_flight=0", "strategy.weights=fresh", "+strategy.virtual_workers=2"])
def test_what_the_strategy_refuses_is_one_sentence(ends: Ends, override: str) -> None:
    _, error = ends(2, override, "trainer.fast_dev_run=true", "trainer.callbacks.progress=null")
    assert override.lstrip("+").removeprefix("strategy.").split("=")[0] in error
    assert "Traceback" not in error


def test_the_whole_error_is_shown_on_request(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SettingError, match=r"did you mean strategy\.in_flight"):
        train("strategy.in_fligt=6")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.fails=2", 'raise ValueError("a bug in training_step")'),
        ("model.refuses=true", 'raise ValueError("a bug in __init__")'),
    ],
)
def test_a_bug_of_the_users_shows_its_own_traceback(ends: Ends, override: str, line: str) -> None:
    _, error = ends(1, *MINE, override)
    assert line in error
    assert "users_model.py" in error
    assert "/hydra/" not in error
    assert "HYDRA_FULL_ERROR" not in error


def test_an_import_that_fails_in_the_users_file_shows_its_line(ends: Ends, folder: Path) -> None:
    (folder / "users_model.py").write_text("import not_installed_at_all\n")
    _, error = ends(1, *MINE)
    assert 'users_model.py", line 1' in error


def test_ctrl_c_while_it_trains_ends_with_130(folder: Path) -> None:
    command = [sys.executable, "-m", "lightning_hetpipe.cli.train", *MINE, "model.interrupts=true"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert run.returncode == 130, run.stderr
    assert "hetpipe-train: interrupted." in run.stderr
    assert "Traceback" not in run.stderr


def test_ctrl_c_before_it_trains_ends_with_130(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_hetpipe.cli.settings.check", interrupted)
    _, error = ends(130)
    assert error == "\nhetpipe-train: interrupted.\n"
