"""Virtual worker 0 is lost: the lowest one that is left saves what it has, from which the run goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.support.equality import difference
from tests.wsp.launch import Job, left_behind, start
from tests.wsp.test_exact import expected


@pytest.mark.slow
def test_the_weights_that_all_have_had_are_saved_and_gone_on_from(tmp_path: Path) -> None:
    """It is killed after its fifth push, which the servers that die with it may have passed on or not."""
    kill = {"vw": 0, "room": "fit-1", "message": "Pushed", "nth": 5, "when": "after", "what": "kill"}
    folder = tmp_path / "first"
    folder.mkdir()
    saves = {"saves": {"every_n_epochs": 1}}
    job = Job(folder, "by epoch", (5, 5), in_flight=2, more={"faults": [kill], "wsp": {"lease": 8.0}, **saves})
    done = start(job)
    assert done.returncode == -signal.SIGKILL
    assert left_behind(job) == []
    (rescued,) = folder.glob("rescued-epoch=1-step=*.ckpt")
    assert f"virtual worker 0 is lost, and virtual worker 1 has saved {rescued}" in done.stderr
    saved = torch.load(rescued, weights_only=False)
    states = expected(job, 2)[1].states
    names = states[0].weights
    found = {name: saved["state_dict"][name] for name in names}
    assert any(difference(states[version].weights, found) is None for version in (7, 9)), "of the last waves"

    (tmp_path / "second").mkdir()
    again = Job(tmp_path / "second", "by epoch", (5, 5), in_flight=2, more={"resume": str(rescued), **saves})
    done = start(again)
    assert done.returncode == 0, done.stderr
    assert "it goes on from virtual worker 0's optimizer state" in done.stderr
    assert all(found is not None for found in again.written_so_far())
