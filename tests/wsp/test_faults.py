"""Faults of any day: the launch ends, or goes on, and says why; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.wsp.launch import Job, finished, left_behind, start
from tests.wsp.test_exact import check, expected


def launched(tmp_path: Path, what: str, worker: int = 1) -> subprocess.CompletedProcess[str]:
    job = Job(tmp_path, more={"fault": (worker, 2, what), "wsp": {"lease": 3.0}, "trainer": {"max_epochs": 1}})
    done = start(job)
    assert left_behind(job) == []
    return done


@pytest.mark.slow  # tests/launch has it with smaller programs
def test_an_exception_in_one_ends_all(tmp_path: Path) -> None:
    done = launched(tmp_path, "raise")
    assert done.returncode == 1
    assert "ValueError: a bad batch" in done.stderr
    assert "VW 1 failed: ValueError: a bad batch" in done.stderr


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_named(tmp_path: Path) -> None:
    done = launched(tmp_path, "nan")
    assert done.returncode == 1
    assert "has a NaN or infinity in 'task.net.0.weight'" in done.stderr


@pytest.mark.slow
def test_the_others_go_on_without_one_that_was_killed(tmp_path: Path) -> None:
    done = launched(tmp_path, "SIGKILL")
    assert done.returncode == 1, done.stderr
    assert "virtual worker 1" in done.stderr
    assert done.stderr.count("died by SIGKILL") == 2, "as it happens, and at the end"
    assert "is lost" not in done.stderr, "it was said"
    assert (tmp_path / "0.pt").exists()
    assert not (tmp_path / "1.pt").exists()


@pytest.mark.slow
def test_code_after_the_training_that_outlasts_its_bound_is_ended_and_the_program_fails(tmp_path: Path) -> None:
    """It was ended after ten seconds, whatever was set, and the program exited with 0."""
    os.mkfifo(tmp_path / "never")
    job = Job(tmp_path, more={"lasts": 1, "wsp": {"end_timeout": 2.0}, "trainer": {"max_epochs": 1}})
    done = start(job)
    assert left_behind(job) == []
    assert done.returncode == 1, done.stderr
    assert "had not ended 2 seconds after this process, and is told to end; raise WSPCallback(end_t" in done.stderr
    assert (tmp_path / "1.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 1])
def test_control_c_in_one_ends_all(tmp_path: Path, worker: int) -> None:
    done = launched(tmp_path, "SIGINT", worker)
    assert done.returncode != 0
    assert list(tmp_path.iterdir()) == []


def address(vw: int, message: str, nth: int, when: str, what: str, **more: str) -> dict[str, Any]:
    return {"vw": vw, "room": "fit-1", "message": message, "nth": nth, "when": when, "what": what, **more}


def befallen(tmp_path: Path, *faults: dict[str, Any]) -> tuple[Job, subprocess.CompletedProcess[str]]:
    job = Job(tmp_path, lengths=(5, 4), in_flight=2, more={"faults": faults, "wsp": {"lease": 8.0}})
    done = start(job)
    assert left_behind(job) == []
    return job, done


DEATHS = {
    "in mid-push": address(1, "StageUpdate", 2, "middle", "kill"),
    "while its push is read where it lies": address(1, "StageUpdate", 2, "middle", "kill", shared="yes"),
    "in mid-pull": address(1, "Read", 2, "middle", "kill"),
    "in mid-pull of what lies there": address(1, "Read", 2, "middle", "kill", shared="yes"),
    "while it waits at a cut": address(0, "Arrive", 1, "before", "kill others", once="wait"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEATHS)
def test_the_others_train_to_the_end_without_one_that_dies(name: str, tmp_path: Path) -> None:
    _, done = befallen(tmp_path, DEATHS[name])
    assert done.returncode == 1, done.stderr
    assert "hetpipe: this run went on without virtual worker 1, which died by SIGKILL." in done.stderr
    assert len(torch.load(tmp_path / "0.pt", weights_only=False)["outputs"]) == 10  # all minibatches of two epochs
    assert not (tmp_path / "1.pt").exists()


@pytest.mark.slow
def test_one_that_dies_before_all_have_met_ends_all(tmp_path: Path) -> None:
    """The others waited an hour for it to come."""
    _, done = befallen(tmp_path, {**address(1, "Join", 1, "before", "kill"), "room": "talk-1"})
    assert done.returncode == 1, done.stderr
    assert "VW 0 cannot go on without VW 1, which died by SIGKILL" in done.stderr


@pytest.mark.slow
def test_the_death_of_the_first_one_ends_all(tmp_path: Path) -> None:
    """It started the launch, and is what Lightning calls rank 0."""
    _, done = befallen(tmp_path, address(0, "StageUpdate", 2, "middle", "kill"))
    assert done.returncode == -signal.SIGKILL
    assert "ends, as its launcher (process" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_one_that_was_stopped_for_longer_than_its_lease_ends_alone(tmp_path: Path) -> None:
    stop = address(1, "StageUpdate", 2, "before", "stop")
    _, done = befallen(tmp_path, stop, address(0, "Arrive", 2, "before", "continue others"))
    assert done.returncode == 1, done.stderr
    silent = "silent for longer than its lease of 8 s (raise WSPCallback(lease=...) if it may be)"
    assert done.stderr.count(f"virtual worker 1 ends, as the others have gone on without it: VW 1 was {silent}") == 1
    lost = f"hetpipe: virtual worker 1 is lost after 1 waves: it was {silent}; the others go on without it.\n"
    assert done.stderr.count(lost) == 1
    assert done.stderr.count(f"hetpipe: this run went on without virtual worker 1, which was {silent}.\n") == 1
    assert len(torch.load(tmp_path / "0.pt", weights_only=False)["outputs"]) == 10
    assert not (tmp_path / "1.pt").exists()


@pytest.mark.slow
def test_one_that_stays_stopped_goes_on_when_the_others_have_ended(tmp_path: Path) -> None:
    """It was waited for without end."""
    _, done = befallen(tmp_path, address(1, "StageUpdate", 2, "before", "stop"))
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("virtual worker 1 ends, as the others have gone on without it") == 1
    assert "hetpipe: this run went on without virtual worker 1, which was silent" in done.stderr
    assert not (tmp_path / "1.pt").exists()


@pytest.mark.slow
def test_garbage_changes_nothing(tmp_path: Path) -> None:
    """While VW 0 computes, and while it waits for VW 1, from which it comes."""
    faults = [
        address(1, "StageUpdate", 1, "before", "garbage"),
        address(1, "StageUpdate", 2, "before", "garbage", once="pushed"),
        address(1, "Arrive", 1, "after", "garbage"),
    ]
    job = Job(tmp_path, lengths=(5, 4), in_flight=2, more={"faults": faults})
    found, said = finished(job)
    check(job, found, expected(job, 2))
    assert "was started again" not in said
