"""The launch's server is killed: another one takes its place, and training ends as if nothing had happened (L5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.wsp.launch import Job, finished
from tests.wsp.test_exact import check, expected


def address(vw: int, message: str, nth: int, when: str, **more: str) -> dict[str, Any]:
    return {"vw": vw, "room": "fit-1", "message": message, "nth": nth, "when": when, "what": "server", **more}


CASES: dict[str, list[dict[str, Any]]] = {
    "in mid-push": [address(1, "Stage", 2, "middle")],
    "between a push's bytes and its word": [address(0, "Pushed", 2, "before")],
    "after a push": [address(1, "Pushed", 1, "after")],
    "in mid-pull": [address(0, "Read", 2, "middle")],
    "after a pull": [address(1, "Pulled", 2, "before")],
    "while the other waits for a wave": [address(1, "Stage", 2, "before", once="pushed")],
    "while the other waits at a cut": [address(1, "Arrive", 1, "before", once="wait")],
    "at a cut": [address(0, "Arrive", 1, "after")],
    "in a gather": [address(1, "Gather", 2, "before")],
    "in a gather's end": [address(0, "Fetch", 2, "before")],
    "while they join": [address(1, "Join", 1, "before")],
    "while the weights are loaded": [address(0, "Load", 1, "middle")],
    "at the end": [address(1, "Leave", 1, "before")],
    "twice": [address(1, "Stage", 2, "middle"), address(0, "Load", 2, "middle")],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_training_ends_as_if_it_had_not(name: str, tmp_path: Path) -> None:
    job = Job(tmp_path, lengths=(5, 4), in_flight=2, more={"faults": CASES[name], "wsp": {"lease": 9.0}})
    found, said = finished(job)
    check(job, found, expected(job, 2))
    assert said.count("died by SIGKILL and was started again") == len(CASES[name]), said
