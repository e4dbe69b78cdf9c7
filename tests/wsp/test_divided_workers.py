"""Virtual workers with divided layers: with D = 0 as an unsplit loop up to rounding, and bit for bit again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle import Run
from tests.support.equality import assert_same
from tests.wsp.launch import Job, run_all
from tests.wsp.test_exact import expected

LONGEST = ["task.net.2", "task.net.4"]
"""Layers that take most of the time, so that two devices take one each, and three join."""

FIVE = {"devices": 5}
"""Devices, of which the first virtual worker has three, and the second two."""


def check_close(found: list[dict[str, Any]], runs: list[Run]) -> None:
    for each, wanted in zip(found, runs, strict=True):
        torch.testing.assert_close(each["outputs"], wanted.outputs, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(each["end"].weights, wanted.states[-1].weights, rtol=1e-9, atol=1e-10)


def again(job: Job) -> list[dict[str, Any]]:
    """Run ``job`` twice; what it has found, the same both times."""
    other = replace(job, folder=job.folder / "again")
    other.folder.mkdir()
    first, second = run_all(job, other)
    for one, two in zip(first, second, strict=True):
        assert (one["devices"], one["stages"]) == (two["devices"], two["stages"])
        assert_same(one["outputs"], two["outputs"])
        assert_same(one["end"].weights, two["end"].weights)
    return first


@pytest.mark.slow
def test_shares_of_stages(tmp_path: Path) -> None:
    job = Job(tmp_path, "doubles", (5, 4), more={"split": {"0": [2, 1]}})
    found = again(job)
    assert [each["devices"] for each in found] == [["cpu + cpu", "cpu"]] * 2
    check_close(found, expected(job, 3))


@pytest.mark.slow
def test_each_planner_joins_devices_of_its_own(tmp_path: Path) -> None:
    more = {"split": "auto", "longest": LONGEST[:1], "trainer": {"devices": 6}}
    job = Job(tmp_path, "doubles", (5, 4), 2, 3, more)
    found = again(job)
    assert [each["devices"].count("cpu + cpu") for each in found] == [1, 1]
    check_close(found, expected(job, 3))


def test_all_have_as_many_in_flight_as_the_one_that_would_choose_most(tmp_path: Path) -> None:
    """The first one would have one in flight, on one stage."""
    job = Job(tmp_path, "doubles", (5, 4), "auto", "auto", {"split": "auto", "longest": LONGEST, "trainer": FIVE})
    found = again(job)
    assert [each["devices"] for each in found] == [["cpu + cpu + cpu"], ["cpu", "cpu"]]
    (job.in_flight,) = {each["in_flight"] for each in found}
    assert job.in_flight > 1
    check_close(found, expected(job, job.in_flight))
