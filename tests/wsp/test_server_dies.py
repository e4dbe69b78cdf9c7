"""The launch's server is killed: another one takes its place, and training ends as if nothing had happened (L5)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_hetpipe.server.process.server_process import STARTS
from tests.wsp.launch import Job, finished, left_behind, start
from tests.wsp.test_exact import check, expected


def address(vw: int, message: str, nth: int, when: str, **more: str) -> dict[str, Any]:
    return {"vw": vw, "room": "fit-1", "message": message, "nth": nth, "when": when, "what": "server", **more}


CASES: dict[str, list[dict[str, Any]]] = {
    "in mid-push": [address(1, "StageUpdate", 2, "middle")],
    "while it reads a push where it lies": [address(1, "StageUpdate", 2, "middle", shared="yes")],
    "between a push's bytes and its word": [address(0, "Pushed", 2, "before")],
    "after a push": [address(1, "Pushed", 1, "after")],
    "in mid-pull": [address(0, "Read", 2, "middle")],
    "in mid-pull of what lies there": [address(0, "Read", 2, "middle", shared="yes")],
    "after a pull": [address(1, "Pulled", 2, "before")],
    "while the other waits for a wave": [address(1, "StageUpdate", 2, "before", once="pushed")],
    "while the other waits at a cut": [address(1, "Arrive", 1, "before", once="wait")],
    "at a cut": [address(0, "Arrive", 1, "after")],
    "in a gather": [address(1, "Gather", 2, "before")],
    "in a gather's end": [address(0, "Gather", 2, "after")],
    "while they join": [address(1, "Join", 1, "before")],
    "while the weights are loaded": [address(0, "Load", 1, "middle")],
    "twice": [address(1, "StageUpdate", 2, "middle"), address(0, "Load", 2, "middle")],
}


COMPUTING = {"fault": (1, 2, "server")}
"""VW 1 kills it in a training_step, when nobody waits for anything."""
IN_VALIDATION = {
    "faults": [address(1, "Gather", 4, "after")],
    "validate": True,
    "trainer": {"val_check_interval": 2, "max_epochs": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_training_ends_as_if_it_had_not(name: str, tmp_path: Path) -> None:
    job = Job(tmp_path, lengths=(5, 4), in_flight=2, more={"faults": CASES[name], "wsp": {"lease": 9.0}})
    found, said = finished(job)
    check(job, found, expected(job, 2))
    assert said.count("died by SIGKILL and was started again") == len(CASES[name]), said


@pytest.mark.slow
def test_while_they_compute(tmp_path: Path) -> None:
    job = Job(tmp_path, lengths=(5, 4), in_flight=2, more={**COMPUTING, "wsp": {"lease": 9.0}})
    found, said = finished(job)
    check(job, found, expected(job, 2))
    assert said.count("died by SIGKILL and was started again") == 2, said  # once in each epoch


@pytest.mark.slow
def test_in_a_validation_whose_metrics_all_share(tmp_path: Path) -> None:
    job = Job(tmp_path, lengths=(4, 4), in_flight=2, more={**IN_VALIDATION, "wsp": {"lease": 9.0}})
    found, said = finished(job)
    check(job, found, expected(job, 2, 1, cuts=[2]))
    one, other = found
    assert one["metrics"]["count"] == 6  # three batches on each
    for name in ("loss", "mean", "count"):
        assert one["metrics"][name] == other["metrics"][name], name
    assert said.count("died by SIGKILL and was started again") == 1, said


@pytest.mark.slow
def test_at_the_very_end(tmp_path: Path) -> None:
    """When the launch ends anyway; whether another one was started is all the same."""
    job = Job(tmp_path, more={"faults": [address(1, "Leave", 1, "before")], "trainer": {"max_epochs": 1}})
    found, _ = finished(job)
    check(job, found, expected(job, 3, 1))
    assert left_behind(job) == []


@pytest.mark.slow
def test_one_that_dies_again_and_again_ends_the_launch(tmp_path: Path) -> None:
    death = {"vw": 1, "room": "fit-1", "message": "Hello", "when": "before", "what": "server"}
    job = Job(tmp_path, more={"faults": [death], "wsp": {"lease": 9.0}})
    done = start(job)
    assert done.returncode == 1, done.stderr
    says = rf"ServerLost: the parameter server at 127\.0\.0\.1:\d+ has failed {STARTS + 1} times: it .*\n"
    assert re.search(says, done.stderr), done.stderr
    assert left_behind(job) == []
