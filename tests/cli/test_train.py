"""hetpipe-train from the command line to the summary."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.cli.conftest import Ends, Train

FAST = ["trainer.max_epochs=1", "trainer.limit_train_batches=3", "trainer.limit_val_batches=1"]
FAST += ["trainer.limit_test_batches=1", "trainer.enable_progress_bar=false", "callbacks.progress_bar=null"]

MINE = ["--config-dir", "mine", "experiment=mine"]
"""A user's model, which needs no graph: the demo's is captured for training, for validations and for tests."""


def test_without_the_strategy_there_is_no_table(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    train("strategy=plain", *FAST)
    said = capsys.readouterr().out
    assert "Trained as a pipeline" not in said
    assert "test accuracy" in said
    assert re.search(r"torch threads +1; stages of a pipeline use OMP_NUM_THREADS", said)


def test_a_dry_run_leaves_no_checkpoint_and_still_ends_well(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    train("trainer.fast_dev_run=true", "model.blocks=1", "model.width=4", "callbacks.progress_bar=null")
    said = capsys.readouterr().out
    assert "test accuracy" in said
    assert "\ncheckpoint" not in said
    assert "samples per second   –" in said


@pytest.mark.filterwarnings("error:stale gradients may keep")
def test_the_gpt_leaves_logs_a_checkpoint_and_a_summary(
    train: Train, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("experiment=gpt", "model.blocks=1", "data.max_bytes=20000", "strategy.stages=2", *FAST)
    said = capsys.readouterr().out
    for label in ("samples per second", "test bits per byte", "checkpoint", "tensorboard --logdir outputs"):
        assert label in said
    (run,) = (folder / "outputs").glob("*/*")
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    (checkpoint,) = (run / "checkpoints").glob("*.ckpt")
    assert str(checkpoint.relative_to(folder)) in said
    assert OmegaConf.load(run / ".hydra" / "config.yaml").strategy.stages == 2


def test_the_same_seed_gives_the_same_result(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    results: list[str] = []
    for seed in (1, 1, 2):
        train(*MINE, f"seed={seed}", *FAST, f"hydra.run.dir=run{len(results)}")
        results += [line for line in capsys.readouterr().out.splitlines() if line.startswith("train loss")]
    assert results[0] == results[1] != results[2]


def test_a_run_is_resumed_from_a_checkpoint(train: Train, folder: Path) -> None:
    train(*MINE, *FAST)
    (first,) = folder.glob("outputs/*/*/checkpoints/*.ckpt")
    train(*MINE, f"ckpt_path={first}", *FAST, "trainer.max_epochs=2", "hydra.run.dir=resumed")
    (second,) = folder.glob("resumed/checkpoints/*.ckpt")
    assert "step=6" in second.name


def test_a_sweep_runs_each_job(train: Train, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("-m", *MINE, "strategy.stages=1,2", "strategy.in_flight=4", *FAST)
    said = capsys.readouterr().out
    assert "pipeline of 1 stage," in said
    assert "pipeline of 2 stages," in said
    assert len(list(folder.glob("multirun/*/*/*/checkpoints/*.ckpt"))) == 2


def test_a_sweep_goes_on_after_a_job_that_fails(ends: Ends) -> None:
    jobs = ["+model.fails=1,null", "strategy.stages=2,50"]
    output, error = ends(1, "-m", *MINE, *jobs, "callbacks=none")
    assert error.count("Traceback") == error.count("ValueError: a bug in training_step") == 1
    assert error.count("hetpipe-train: strategy.stages=50 is more than the 3 layers of the pipelined module;") == 2
    assert output.count("Trained as a pipeline of 2 stages") == 1


def test_settings_reach_the_loggers_as_hyperparameters(train: Train, folder: Path) -> None:
    train(*MINE, "+model.width=6", "logger=[csv,tensorboard]", "tags=[first,try]", *FAST)
    for name in ("csv", "tensorboard"):
        (file,) = folder.glob(f"outputs/*/*/{name}/hparams.yaml")
        logged: Any = OmegaConf.to_container(OmegaConf.load(file))
        assert logged["strategy"]["stages"] == 2
        assert logged["strategy"]["wsp"]["aggregate"] == "sum"
        assert logged["model"]["width"] == 6
        assert logged["tags"] == ["first", "try"]


@pytest.mark.filterwarnings("error:stale gradients may keep")
def test_early_stopping_follows_the_metric_of_the_digits(
    train: Train, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends the run after the second epoch, as the accuracy does not improve by all of it."""
    early = ["callbacks=early_stopping", "callbacks.early_stopping.patience=1", "callbacks.early_stopping.min_delta=1"]
    train(*early, *FAST, "model.blocks=1", "model.width=4", "trainer.max_epochs=5", "logger=csv", "hydra.run.dir=early")
    said = capsys.readouterr().out
    assert "Trained as a pipeline of 3 stages, 4 minibatches in flight" in said
    for label in ("samples per second", "test accuracy"):
        assert label in said
    assert re.search(r"^metrics +early/csv/metrics.csv$", said, re.MULTILINE)
    assert "early/checkpoints/" in said
    assert OmegaConf.load(folder / "early" / ".hydra" / "config.yaml").strategy.stages == 3
    rows = csv.DictReader((folder / "early" / "csv" / "metrics.csv").read_text().splitlines())
    assert {row["epoch"] for row in rows if row["val_acc"]} == {"0", "1"}


def test_a_model_in_the_working_directory_is_found(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    train(*MINE)
    said = capsys.readouterr().out
    assert "pipeline of 2 stages" in said
    assert "train loss" in said


@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"]])
def test_hydras_flags_work(train: Train, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    with pytest.raises(SystemExit) if flags == ["--help"] else nullcontext():
        train(*flags)
    said = capsys.readouterr().out
    assert "_target_: lightning_hetpipe.HetPipeStrategy" in said


@pytest.mark.slow
def test_it_runs_as_a_module(folder: Path) -> None:
    command = [sys.executable, "-m", "lightning_hetpipe.cli.hetpipe_train", "--help"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "hetpipe-train trains a LightningModule" in run.stdout


def test_devices_of_a_cluster_are_emulated(
    train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In two stages, however long the layers take on this machine."""
    monkeypatch.setenv("HETPIPE_CACHE", str(folder / "cache"))
    train(*MINE, "cluster=mixed_box", "strategy.stages=2", "trainer.enable_progress_bar=false")
    said = capsys.readouterr().out
    assert "Trained as a pipeline of 2 stages" in said
    assert re.search(r"0 +(RTX-3090:0|RTX-2080-Ti:1|Quadro-RTX-4000:2) \(emulated\)", said)
    assert "ms per minibatch: what the stage takes on its emulated device" in said
    assert list((folder / "cache").rglob("*.json"))
