"""hetpipe-train with several virtual workers: one run, one folder, one report, one exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import USERS_EXPERIMENT, USERS_MODEL

MODEL = (
    USERS_MODEL
    + """

class Leaving(Model):
    def __init__(self, leaves=None):
        super().__init__()
        self.leaves = leaves

    def teardown(self, stage):
        if self.leaves == self.global_rank:
            os._exit(3)
"""
)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "users_model.py").write_text(MODEL)
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "mine.yaml").write_text(USERS_EXPERIMENT)
    return tmp_path


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    quiet = ["trainer.enable_progress_bar=false", "callbacks.progress_bar=null", "strategy.wsp.lease=3"]
    command = [sys.executable, "-m", "lightning_hetpipe.cli.hetpipe_train", "--config-dir", "mine", "experiment=mine"]
    return subprocess.run(
        [*command, "strategy.virtual_workers=2", *quiet, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_a_job_that_went_on_without_one_ends_with_one_and_the_sweep_goes_on(mine: Path) -> None:
    """It ended with 0, and the job's server ran on until the next job."""
    done = train(mine, "-m", "model._target_=users_model.Leaving", "+model.leaves=1,null")
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("hetpipe: this run went on without virtual worker 1, which ended with exit code 3.") == 1
    assert done.stdout.count("\nsamples per second") == 2
    (sweep,) = mine.glob("multirun/*/*")
    assert len(list(sweep.glob("*/checkpoints/*.ckpt"))) == 2
    assert len(list(sweep.glob("*/tensorboard/events.out.tfevents.*"))) == 2
    assert len(list(sweep.glob("*/.hydra"))) == 2
    assert not (mine / "outputs").exists()


@pytest.mark.slow
def test_a_wrong_setting_that_all_run_into_is_said_once(mine: Path) -> None:
    """The others' tracebacks stood between its lines, as they inherit what Hydra is told about errors."""
    done = train(mine, "-m", "strategy.stages=50,2")
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("hetpipe-train: strategy.stages=50 is more than the 3 layers") == 1
    assert done.stdout.count("\nsamples per second") == 1  # of the job with 2 stages
    assert "Traceback" not in done.stderr
    assert "interrupted" not in done.stderr
