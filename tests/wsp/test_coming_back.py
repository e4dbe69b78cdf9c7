"""A virtual worker that was lost comes back when an epoch begins, with the others' state; the bits are the oracle's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.oracle import Run, State
from tests.support.equality import assert_same
from tests.wsp.launch import Job, left_behind, start
from tests.wsp.test_exact import all_batches, together

LEASE = 10.0
"""Seconds for which the others wait for one that was killed; and for one that is to load their state."""


def coming_back(
    folder: Path, message: str = "Pushed", nth: int = 4, when: str = "after", what: str = "kill", **more: Any
) -> Job:
    """A job whose virtual worker 1 ends in the second of four epochs and comes back to the third one."""
    fault = {"vw": 1, "room": "fit-1", "message": message, "nth": nth, "when": when, "what": what}
    faults = [{**fault, "mark": str(folder / "mark")}, *more.pop("faults", ())]
    wsp = {"lease": LEASE, "restarts": 1, **more.pop("wsp", {})}
    task = more.pop("task", "by epoch")
    told: dict[str, Any] = {"faults": faults, "wsp": wsp, "awaits": {"1": 1}, "trainer": {"max_epochs": 4}, **more}
    return Job(folder, task, lengths=(5, 5), in_flight=2, more=told)


def expected(job: Job, waves: int, wave: int = 2, **options: Any) -> tuple[list[Run], list[Run]]:
    """The oracle's runs before and after the return of virtual worker 1, which has pushed ``waves`` of epoch 1."""
    whole = all_batches(job)
    pushed = whole[1][: waves * wave]
    before = together(job, wave, [[whole[0]] * 2, [whole[1], pushed]], **options)
    state = before[0].states[-1]
    done = len(before[0].outputs)
    after = together(job, wave, [[each] * 2 for each in whole], resumed=[(done, state)] * 2, **options)
    return before, after


def check_first(found: dict[str, Any], before: list[Run], after: list[Run]) -> None:
    outputs = [*before[0].outputs, *after[0].outputs]
    assert len(found["outputs"]) == len(outputs)
    for p, (mine, wanted) in enumerate(zip(found["outputs"], outputs, strict=True), start=1):
        assert_same(wanted, mine, f"VW 0, minibatch {p}")
    check_end(found, after[0].states[-1], "VW 0")


def check_second(found: dict[str, Any], after: list[Run]) -> None:
    """Its process has seen nothing of what was before it came back."""
    assert len(found["outputs"]) == len(after[1].outputs)
    for p, (mine, wanted) in enumerate(zip(found["outputs"], after[1].outputs, strict=True), start=1):
        assert_same(wanted, mine, f"VW 1, minibatch {p} after its return")
    check_end(found, after[1].states[-1], "VW 1")


def check_end(found: dict[str, Any], wanted: State, who: str) -> None:
    assert_same(wanted.weights, found["end"].weights, who)
    assert_same(wanted.buffers, found["end"].buffers, who)
    assert_same(wanted.optimizer, found["end"].optimizer, who)


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "after a push": ({}, 1),
    "in mid-push": ({"message": "StageUpdate", "when": "middle"}, 0),
    "in mid-pull": ({"message": "Read", "nth": 5, "when": "middle"}, 1),
    "batchnorm": ({"task": "resnet"}, 1),
    "stage hosts": ({"stage_hosts": "processes"}, 1),
}
"""How virtual worker 1 ends, and how many waves of that epoch it has pushed."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_oracle_with_that_membership(name: str, tmp_path: Path) -> None:
    how, waves = CASES[name]
    job = coming_back(tmp_path, **how)
    done = start(job)
    assert done.returncode == 0, done.stderr
    assert left_behind(job) == []
    assert "died by SIGKILL, and is started again (no more restarts)" in done.stderr
    found = job.written()
    before, after = expected(job, waves)
    check_first(found[0], before, after)
    check_second(found[1], after)
