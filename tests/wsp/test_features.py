"""Features that work with ddp work with several virtual workers: two processes of each use the Trainer alike.

With a learning rate of 0, or numbers that do not depend on the weights, both must see the same: metrics over all
processes, decisions of callbacks, files, rows of data, predictions. Beyond that, virtual workers hold the same weights
wherever a fit ends (ddp's differ in BatchNorm's statistics).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.wsp import uses, uses_of_loops, uses_together
from tests.wsp.launch import ROOT
from tests.wsp.refused_uses import REFUSED

SECONDS = 600
"""For a launch with all uses, on a busy machine."""

QUICK = ("stopping", "together", "metrics")
ONLY_HERE = ("streams",)
COMPARED = [name for these in (uses, uses_of_loops, uses_together) for name in these.USES if name not in ONLY_HERE]


def launch(folder: Path, kind: str, *names: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    job = {"strategy": kind, "folder": str(folder), "uses": names, "settings": settings}
    program = [sys.executable, "-m", "tests.wsp.features_worker", json.dumps(job)]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)


def run(folder: Path, kind: str, *names: str, **settings: Any) -> Path:
    done = launch(folder, kind, *names, **settings)
    assert done.returncode == 0, done.stderr
    return folder


def told(folder: Path, use: str) -> list[dict[str, Any]]:
    """Files that each process wrote."""
    return [json.loads((folder / f"{use}.{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def with_ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("ddp"), "ddp", *COMPARED)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("here"), "hetpipe", *COMPARED, *ONLY_HERE, stages=2, in_flight=3)


def assert_alike(one: Any, other: Any, where: str) -> None:
    """But for roundings, for whether processes agree, and for metrics of this package's own."""
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), where
        for name in one.keys() - {"agree", "tuned", "hetpipe_only", "process_group"}:
            assert_alike(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-4), where
    else:
        assert other == one, where


def disagreements(found: Any, where: str) -> list[str]:
    if not isinstance(found, dict):
        return []
    own = [where] if found.get("agree") is False or found.get("tuned") is False else []
    return own + [each for name, value in found.items() for each in disagreements(value, f"{where}.{name}")]


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("use", COMPARED)
def test_as_with_ddp(use: str, with_ddp: Path, here: Path) -> None:
    for rank, (expected, found) in enumerate(zip(told(with_ddp, use), told(here, use), strict=True)):
        assert_alike(expected, found, f"{use} of rank {rank}")
        assert disagreements(found, use) == []


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_metrics_of_the_synchronisation_reach_the_loggers(here: Path) -> None:
    names = {"members", "clock", "clock_lag", "sync_wait_seconds", "push_bytes", "pull_bytes"}
    assert {f"hetpipe/{name}" for name in names} <= set(told(here, "loggers")[0]["hetpipe_only"])


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_streams_of_unequal_length(here: Path) -> None:
    """Three batches and six: all evaluate together at the end of an epoch, and end together."""
    one, other = told(here, "streams")
    assert disagreements(one, "streams") == []
    assert [found["whole"]["step"] for found in (one, other)] == [9, 18]
    assert [found["whole"]["steps"] for found in (one, other)] == [[3, 6, 9], [6, 12, 18]]
    for name, value in one["whole"]["metrics"].items():
        if name not in ("own", "loss_step"):
            assert other["whole"]["metrics"][name] == value, name
    assert one["whole"]["metrics"]["val_rows"] == 12
    # The second alone reaches a validation in mid-epoch, after which it wants to stop.
    assert [found["stopped"]["epoch"] for found in (one, other)] == [2, 2]
    assert [found["stopped"]["steps"] for found in (one, other)] == [[], [5, 11]]
    # The second alone has taken max_steps.
    assert [found["steps"]["step"] for found in (one, other)] == [6, 9]
    assert [found["steps"]["epoch"] for found in (one, other)] == [2, 2]


@pytest.mark.slow
def test_decisions_collectives_and_metrics(tmp_path: Path) -> None:
    """One process's bad metric ends both; gathers work in hooks, evaluation and after the fit; metrics are of all."""
    run(tmp_path, "hetpipe", *QUICK, stages=2, in_flight=3)
    for found in told(tmp_path, "stopping"):
        assert (found["stopped"], found["epoch"], found["agree"]) == (1, 2, True)
    for rank, each in enumerate(told(tmp_path, "together")):
        found = each["found"]
        assert found["in step"][:2] == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
        assert found["gathered"] == {"a": [[0], [1]], "b": [0.0, 1.0]}
        assert found["told"] == ["from 0", {"rank": 1, "list": [1, [2, None]]}, "p0", [1.0]]
        assert (found["mean"], found["sum"]) == ([1.5, 3.0], [3.0, 6.0])
        assert (found["all"], found["any"], found["at end"], found["after"]) == (False, True, 0, 5)
        assert found["saved"], f"rank {rank} went on before the checkpoint was there"
    for each in told(tmp_path, "metrics"):
        assert not each["process_group"]
        assert each["held"] == [[float(row) for row in range(8)]] * 3
        assert each["after"] == 0.5
        assert each["metrics"]["test_rows"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("use", REFUSED)
def test_refusals(tmp_path: Path, use: str) -> None:
    done = launch(tmp_path, "hetpipe", use, stages=2, in_flight=3)
    assert done.returncode == 1, done.stderr
    assert REFUSED[use][1] in " ".join(done.stderr.split()), done.stderr
    assert "went on without" not in done.stderr
