"""The programs and commands of docs/timeline.md do what it says."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import folder, train

__all__ = ["folder", "train"]

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "timeline.md").read_text()
PROGRAMS = {name: text for text, name in re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```", DOCUMENT, re.M | re.S)}
COMMANDS = re.findall(r"^    hetpipe-train (.*)$", DOCUMENT, re.M)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs a program of the document in an empty folder; gives its variables."""
    monkeypatch.chdir(tmp_path)

    def run(name: str) -> dict[str, Any]:
        (tmp_path / name).write_text(PROGRAMS[name])
        monkeypatch.setattr(sys, "argv", [name])
        return runpy.run_path(name, run_name="__main__")

    return run


def test_all_programs_are_run_here() -> None:
    assert list(PROGRAMS) == ["train.py", "together.py", "simulated.py", "profiled.py"]
    assert COMMANDS == ["strategy.timeline=true", "'strategy.timeline=[20,40]'"]


@pytest.mark.slow  # tests/run/test_timeline.py has what it draws
def test_the_program(written: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written("train.py")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "ten_to_twenty.json").read_text())["traceEvents"]
    assert {event["args"]["minibatch"] for event in events if event["ph"] == "X"} == set(range(10, 21))
    assert (tmp_path / "timeline-2-64.json").exists()
    assert len(re.findall(r"^stage \d was busy for \d+% of the time$", capsys.readouterr().out, re.M)) == 3


def test_the_simulation(written: Callable[..., Any], tmp_path: Path) -> None:
    written("simulated.py")
    assert (tmp_path / "simulated.png").read_bytes().startswith(b"\x89PNG")


def test_the_profiler(written: Callable[..., Any]) -> None:
    assert written("profiled.py")["profiler"] is not None


@pytest.mark.parametrize("command", [COMMANDS[0], pytest.param(COMMANDS[1], marks=pytest.mark.slow)])
def test_the_commands(train: Callable[..., None], folder: Path, command: str) -> None:
    mine = ["--config-dir", "mine", "experiment=mine", "trainer.max_epochs=6", "trainer.enable_progress_bar=false"]
    train(*mine, "trainer.callbacks=null", command.strip("'"))
    (trace,) = folder.rglob("timeline-*.json")
    assert trace.name == ("timeline-20-40.json" if "20" in command else "timeline-2-48.json")
    assert list(trace.parent.glob("events.out.tfevents.*"))


@pytest.mark.slow
def test_several_virtual_workers(tmp_path: Path) -> None:
    """Each writes a trace of its own, in one folder, and all go into one."""
    for name in ("train.py", "together.py"):
        (tmp_path / name).write_text(PROGRAMS[name])
    for command in (["train.py", "2"], ["together.py"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
    names = {path.name for path in tmp_path.glob("timeline*.json")}
    assert names == {"timeline-vw0-2-32.json", "timeline-vw1-2-32.json"}
    events = json.loads((tmp_path / "together.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}
    works = {event["name"].rpartition(" ")[0] for event in events if event["ph"] == "X"}
    assert {"forward", "backward", "synchronise"} <= works
