"""Children of the launcher, started again."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lightning_hetpipe.launch import children
from lightning_hetpipe.launch.children import Children
from lightning_hetpipe.launch.command import Command
from lightning_hetpipe.launch.ends import LostWorkers
from lightning_hetpipe.launch.ranks import Rank, Role
from tests.wsp.faults import until

PROGRAM = """
import os, pathlib, signal, socket, sys
link = socket.socket(fileno=int(os.environ["HETPIPE_VIRTUAL_WORKER"].partition("@")[2]))
if pathlib.Path(sys.argv[1]).exists():
    signal.pause()
pathlib.Path(sys.argv[1]).touch()
link.sendall(b'{"arrived": true}\\n')
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Takes part, and is killed; the next process waits."""

SECONDS = 30.0


def test_one_that_is_started_again_while_all_are_ended_ends_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was started once all others had ended, and nobody ended it."""
    said: list[str] = []
    ends: list[threading.Thread] = []

    def say(what: str) -> None:
        said.append(what)
        ends.append(threading.Thread(target=started.end, args=(signal.SIGTERM, SECONDS)))
        ends[0].start()
        until(lambda: not started._may_restart, "nobody ends them")

    monkeypatch.setattr(children, "say", say)
    started = two(tmp_path)
    (watch,) = (each for each in threading.enumerate() if each.name == "hetpipe-launcher-1")
    started.give({})
    watch.join(SECONDS)
    assert not watch.is_alive(), "a process is left"
    ends[0].join()
    assert started.ended
    assert "is started again (no more restarts)" in said[0]


def test_one_that_cannot_be_started_again_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its loss was told to nobody."""
    said: list[str] = []
    monkeypatch.setattr(children, "say", said.append)
    started = two(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    monkeypatch.setattr(children, "lost_workers", LostWorkers())
    over: dict[int, int] = {}
    (watch,) = (each for each in threading.enumerate() if each.name == "hetpipe-launcher-1")
    started.watch(over.__setitem__)
    started.give({})
    watch.join(SECONDS)
    assert over == started.failures == {1: -signal.SIGKILL}
    assert "cannot be started again: no more processes" in said[0]


def two(folder: Path) -> Children:
    program = Command([sys.executable, "-c", PROGRAM, str(folder / "mark")], str(folder), None)
    return Children(program, Rank(0, 2, 0, 0, 2, 1, Role.FIRST), restarts=1)


def no_process(*_: object, **__: object) -> None:
    raise BlockingIOError("no more processes")
