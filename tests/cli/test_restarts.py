"""hetpipe-train with restarts: a run that loses virtual worker 0 is started again, and ends as if it had not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import USERS_EXPERIMENT, USERS_MODEL
from tests.support import namespaces
from tests.wsp.launch import free_port

MODEL = (
    USERS_MODEL
    + '''

import threading

class Mortal(Model):
    """Virtual worker 0 kills itself, or what is told, in the third minibatch of the second epoch, and so of others.

    Before, and in the first three epochs, it may wait for another one to come.
    """

    def __init__(self, deaths=1, signal=9, of="itself", since=1, awaits=False):
        super().__init__()
        self.since, self.awaits = since, awaits
        self.deaths, self.signum, self.of = deaths, signal, of

    def on_train_start(self):
        with open(f"process-{self.global_rank}", "w") as file:
            file.write(str(os.getpid()))

    def on_train_batch_start(self, batch, batch_idx):
        so_far = os.path.getsize("deaths") if os.path.exists("deaths") else 0
        if self.global_rank or batch_idx < 2:
            return
        if self.awaits and self.current_epoch < 3:
            group, again = self.trainer.strategy._workers.group, threading.Event()
            while len(group.seats.taken) == 1 and not group.seats.ready():
                again.wait(0.05)
        if self.current_epoch == self.since + so_far and batch_idx == 2 and so_far < self.deaths:
            with open("deaths", "a") as file:
                file.write("x")
            if self.of == "group":
                os.killpg(0, self.signum)
            else:
                if self.of == "the first two":
                    os.kill(int(open("process-1").read()), self.signum)
                os.kill(os.getppid() if self.of == "supervisor" else os.getpid(), self.signum)

    def on_train_epoch_end(self):
        with open(f"epochs-{self.global_rank}", "a") as file:
            print(self.current_epoch, file=file)
'''
)


def command(folder: Path, *arguments: str) -> list[str]:
    (folder / "users_model.py").write_text(MODEL)
    (folder / "mine" / "experiment").mkdir(parents=True)
    (folder / "mine" / "experiment" / "mine.yaml").write_text(USERS_EXPERIMENT)
    program = [sys.executable, "-m", "lightning_hetpipe.cli.hetpipe_train", "--config-dir", "mine", "experiment=mine"]
    given = ["model._target_=users_model.Mortal", "strategy.virtual_workers=2", "trainer.max_epochs=4"]
    given += ["trainer.enable_progress_bar=false", "callbacks.progress_bar=null", "strategy.wsp.restarts=1"]
    return [*program, *given, *arguments]


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *arguments),
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
    assert "[INFO]" not in done.stdout + done.stderr, "Lightning prints its lines itself"
    assert len(list(tmp_path.glob("outputs/*/*"))) == 1, "one run has one folder"


@pytest.mark.slow
def test_virtual_worker_0_is_stopped_for_longer_than_its_lease(tmp_path: Path) -> None:
    """The others save the run and end, and it is woken, which would stay stopped for ever."""
    done = train(tmp_path, f"+model.signal={int(signal.SIGSTOP)}", "strategy.wsp.lease=6")
    assert done.returncode == 0, done.stderr
    assert "hetpipe: virtual worker 0 ends, and the others do, as they have missed it: VW 0 was silent" in done.stderr
    assert "start the run again, from the newest checkpoint" in done.stderr
    (rescued,) = tmp_path.glob("outputs/*/*/checkpoints/rescued-epoch=1-step=*.ckpt")
    assert f"ended with exit code 75, and the run is started again from {rescued} (no more restarts)" in done.stderr
    assert epochs(tmp_path, 0) == epochs(tmp_path, 1) == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_another_one_is_stopped_with_virtual_worker_0(tmp_path: Path) -> None:
    """It is woken, too: else virtual worker 0, which waits for it, would never end, and no run be started again."""
    stop = ["+model.of=the first two", f"+model.signal={int(signal.SIGSTOP)}"]
    done = train(tmp_path, *stop, "strategy.virtual_workers=3", "strategy.wsp.lease=6")
    assert done.returncode == 0, done.stderr
    (rescued,) = tmp_path.glob("outputs/*/*/checkpoints/rescued-epoch=1-step=*.ckpt")
    assert f"ended with exit code 75, and the run is started again from {rescued} (no more restarts)" in done.stderr
    assert epochs(tmp_path, 0) == epochs(tmp_path, 2) == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_one_that_a_person_has_started_comes_to_the_run_that_is_started_again(tmp_path: Path) -> None:
    """It is the lowest one that is left, and saves the run; then it is started again, too, from what it has saved."""
    given = command(
        tmp_path, "strategy.virtual_workers=[1,2]", "strategy.wsp.restarts=2", "+model.awaits=true", "+model.since=2"
    )
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **meeting}
    seats: list[dict[str, str]] = [{}, {"LOCAL_RANK": "1"}]
    processes = [
        subprocess.Popen(
            given,
            cwd=tmp_path,
            env={**environment, **seat},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for seat in seats
    ]
    try:
        (code, _, said), (other, _, told) = namespaces.finished(processes, 300)
    finally:
        for process in processes:
            process.kill()
    assert (code, other) == (0, 0), said + told
    rescued = next(tmp_path.glob("outputs/*/*/checkpoints/rescued-epoch=2-step=*.ckpt"), None)
    assert f"virtual worker 0 is lost, and virtual worker 1 has saved {rescued}" in told, said + told
    assert f"died by SIGKILL, and the run is started again from {rescued} (1 more restart)" in said
    assert "virtual worker 1 ends, as virtual worker 0 is lost; start both again" in told
    assert "ended with exit code 75, and is started again (1 more restart)" in told
    assert epochs(tmp_path, 0) == ["0", "1", "2", "3"]
    assert epochs(tmp_path, 1)[-1] == "3"


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
