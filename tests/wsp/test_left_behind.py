"""However a launch ends, nothing of it is left: no process, socket, shared memory or temporary file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.wsp.launch import ROOT
from tests.wsp.leftovers import SECONDS, Holdings


class Ending(NamedTuple):
    """Actions of the program itself, which signal it gets (all of its group, or its first process), how it ends."""

    does: str
    signum: int | None
    to_all: bool
    code: int


ENDINGS = {
    "normal": Ending("return", None, False, 0),
    "an exception in one": Ending("raise", None, False, 1),
    "one is killed": Ending("lose", None, False, 1),
    "Ctrl-C": Ending("last", signal.SIGINT, True, 1),
    "told to end": Ending("last", signal.SIGTERM, False, 128 + signal.SIGTERM),
    "the first is killed": Ending("last", signal.SIGKILL, False, -signal.SIGKILL),
}


class Launched(NamedTuple):
    program: subprocess.Popen[str]
    tag: str
    temporary: Path


def launch(ending: Ending, folder: Path) -> Iterator[Launched]:
    tag = f"LASTING={uuid.uuid4().hex}"
    name, _, value = tag.partition("=")
    # Short, as DataLoader workers make sockets there, whose names may have a hundred characters.
    with tempfile.TemporaryDirectory() as temporary:
        environment = {**os.environ, name: value, "TMPDIR": temporary, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            [sys.executable, "-m", "tests.wsp.lasting", ending.does],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as program:
            yield Launched(program, tag, Path(temporary))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="what processes hold is read from Linux's /proc")
@pytest.mark.parametrize("name", ENDINGS)
def test_nothing_is_left(name: str, tmp_path: Path) -> None:
    ending = ENDINGS[name]
    for program, tag, temporary in launch(ending, tmp_path):
        assert program.stdout is not None
        lines = {program.stdout.readline() for _ in range(2)}
        holdings = Holdings.of(tag)
        try:
            if lines != {"training 0\n", "training 1\n"}:
                program.kill()
                raise AssertionError((lines, *program.communicate(timeout=SECONDS)))
            if ending.signum is not None:
                assert len(holdings.processes) == 5, "two virtual workers, a process of data for each, a server"
                assert holdings.sockets, "the server listens"
                (os.killpg if ending.to_all else os.kill)(program.pid, ending.signum)
            out, err = program.communicate(timeout=SECONDS)
            assert program.returncode == ending.code, err
            assert holdings.left() == []
        finally:
            holdings.close()
        # torch makes an empty folder for its compiler's cache, wherever it is imported.
        assert [path.name for path in temporary.rglob("*") if not path.name.startswith("torchinductor")] == []
        assert list(tmp_path.iterdir()) == []
        assert out == ""
