"""hetpipe-train with restarts: a run that loses virtual worker 0 is started again, and ends as if it had not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import USERS_EXPERIMENT, USERS_MODEL

MODEL = (
    USERS_MODEL
    + """

class Mortal(Model):
    "Virtual worker 0 kills itself, or what is told, in the third minibatch of the second epoch, and so of others."

    def __init__(self, deaths=1, signal=9, of="itself"):
        super().__init__()
        self.deaths, self.signum, self.of = deaths, signal, of

    def on_train_batch_start(self, batch, batch_idx):
        so_far = os.path.getsize("deaths") if os.path.exists("deaths") else 0
        if self.global_rank == 0 and self.current_epoch == 1 + so_far and batch_idx == 2 and so_far < self.deaths:
            with open("deaths", "a") as file:
                file.write("x")
            if self.of == "group":
                os.killpg(0, self.signum)
            else:
                os.kill(os.getppid() if self.of == "supervisor" else os.getpid(), self.signum)

    def on_train_epoch_end(self):
        with open(f"epochs-{self.global_rank}", "a") as file:
            print(self.current_epoch, file=file)
"""
)


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "users_model.py").write_text(MODEL)
    (folder / "mine" / "experiment").mkdir(parents=True)
    (folder / "mine" / "experiment" / "mine.yaml").write_text(USERS_EXPERIMENT)
    command = [sys.executable, "-m", "lightning_hetpipe.cli.hetpipe_train", "--config-dir", "mine", "experiment=mine"]
    given = ["model._target_=users_model.Mortal", "strategy.virtual_workers=2", "trainer.max_epochs=4"]
    given += ["trainer.enable_progress_bar=false", "callbacks.progress_bar=null", "strategy.wsp.restarts=1"]
    return subprocess.run(
        [*command, *given, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        start_new_session=True,
    )


def epochs(folder: Path, vw: int) -> list[str]:
    return (folder / f"epochs-{vw}").read_text().split()


@pytest.mark.slow
def test_virtual_worker_0_is_killed(tmp_path: Path) -> None:
    done = train(tmp_path)
    assert done.returncode == 0, done.stderr
    (rescued,) = tmp_path.glob("outputs/*/*/checkpoints/rescued-epoch=1-step=*.ckpt")
    (line,) = (line for line in done.stderr.splitlines() if "is started again" in line)
    assert line.startswith("hetpipe: virtual worker 0 (process ")
    assert line.endswith(f"died by SIGKILL, and the run is started again from {rescued} (no more restarts).")
    assert epochs(tmp_path, 0) == epochs(tmp_path, 1) == ["0", "1", "2", "3"]
    assert done.stdout.count("\nsamples per second") == 1
    assert len(list(tmp_path.glob("outputs/*/*"))) == 1, "one run has one folder"


@pytest.mark.slow
def test_it_is_killed_more_often_than_it_is_started_again(tmp_path: Path) -> None:
    done = train(tmp_path, "+model.deaths=2")
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "died by SIGKILL, and the run has ended; no restart is left" in done.stderr
    assert epochs(tmp_path, 0) == ["0", "1"]


@pytest.mark.slow
def test_a_single_virtual_worker_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    done = train(tmp_path, "strategy.virtual_workers=1")
    assert done.returncode == 0, done.stderr
    assert "/checkpoints/epoch=0-step=8.ckpt (no more restarts)" in done.stderr
    assert epochs(tmp_path, 0) == ["0", "1", "2", "3"]


@pytest.mark.slow
@pytest.mark.parametrize(("of", "signum", "code"), [("supervisor", 15, 143), ("group", 15, 143), ("group", 2, 130)])
def test_a_run_that_is_told_to_end_is_not_started_again(of: str, signum: int, code: int, tmp_path: Path) -> None:
    done = train(tmp_path, f"+model.of={of}", f"+model.signal={signum}")
    assert done.returncode == code, done.stderr
    assert "is started again" not in done.stderr
    assert ("this run was told to end" in done.stderr) == (code == 143)
    assert done.stderr.count("hetpipe-train: ") == 1
