"""What goes wrong on any day: the launch ends, or goes on, and says why; nothing is left behind."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.wsp.launch import Job, start


def launched(tmp_path: Path, what: str, worker: int = 1) -> subprocess.CompletedProcess[str]:
    job = Job(tmp_path, more={"fault": (worker, 2, what), "wsp": {"lease": 3.0}, "trainer": {"max_epochs": 1}})
    return start(job)


def descendants_of_the_test() -> list[str]:
    """Programs that run tests.wsp.worker or a server, anywhere below this process."""
    found = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if "tests.wsp.worker" in line and f" {os.getpid()} " in line]


def test_an_exception_in_one_ends_all(tmp_path: Path) -> None:
    done = launched(tmp_path, "raise")
    assert done.returncode == 1
    assert "ValueError: a bad batch" in done.stderr
    assert "VW 1 failed: ValueError: a bad batch" in done.stderr
    assert descendants_of_the_test() == []


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_named(tmp_path: Path) -> None:
    done = launched(tmp_path, "nan")
    assert done.returncode == 1
    assert "has a NaN or infinity in 'task.net.0.weight'" in done.stderr


@pytest.mark.slow
def test_the_others_go_on_without_one_that_was_killed(tmp_path: Path) -> None:
    done = launched(tmp_path, "kill")
    assert done.returncode == 0, done.stderr
    assert "virtual worker 1" in done.stderr
    assert "died by SIGKILL" in done.stderr
    assert (tmp_path / "0.pt").exists()
    assert not (tmp_path / "1.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 1])
def test_control_c_in_one_ends_all(tmp_path: Path, worker: int) -> None:
    done = launched(tmp_path, "interrupt", worker)
    assert done.returncode != 0
    assert list(tmp_path.iterdir()) == []
    assert descendants_of_the_test() == []
