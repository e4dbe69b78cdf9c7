from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_hetpipe.cli.training import summary
from lightning_hetpipe.reporting.report import RunReport, StageReport


def test_the_table_of_stages_comes_first_and_throughput_among_the_results() -> None:
    stages = [StageReport("cpu", ["net.0"], ["Linear"], time_s=0.003, busy=0.9, parameters=12)]
    run = RunReport(in_flight=2, minibatches=10, samples_per_second=3120.4, stages=stages)
    text = summary(run, {"test_loss": 0.5})
    assert text == f"\n{run.table}\n\nsamples per second   3,120\ntest loss            0.5"


def test_a_run_without_the_pipeline_says_its_threads() -> None:
    assert "torch threads   4; stages of a pipeline use OMP_NUM_THREADS each, by default 1" in summary(
        None, {}, torch_threads=4
    )


def test_the_results_are_those_of_the_last_part_that_logged_any() -> None:
    text = summary(None, {"train_loss": 3.0, "test_acc": torch.tensor(0.98766), "test_bits_per_byte": 2.87139})
    assert text.splitlines()[1:] == ["test accuracy        98.77%", "test bits per byte   2.871"]
    assert "val loss   0.5" in summary(None, {"train_loss": 3.0, "val_loss": 0.5})


def test_paths_are_relative_and_the_command_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loggers = [CSVLogger(tmp_path, "csv", ""), TensorBoardLogger(tmp_path, "my logs", "")]
    text = summary(None, {}, checkpoint=str(tmp_path / "out" / "best.ckpt"), loggers=loggers)
    assert text.splitlines()[1].split() == ["checkpoint", "out/best.ckpt"]
    assert text.splitlines()[2].split() == ["metrics", "csv/metrics.csv"]
    assert text.endswith("tensorboard --logdir 'my logs'")


def test_a_run_that_left_nothing_says_nothing() -> None:
    assert summary(None, {}).strip() == ""
