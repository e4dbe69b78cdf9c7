"""The test's side of a program whose processes do what they are told."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning_hetpipe

ROOT = Path(lightning_hetpipe.__file__).parents[1]
HERE = Path(__file__).parent
TIMEOUT = 60.0
"""Seconds until a test gives up to hear from a process: many times what it takes on a busy machine."""


class Process:
    """One process of the program: what it says, and what it is told."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(TIMEOUT)
        self.lines = connection.makefile("r")
        self.facts = self.hear()
        self.number: int = self.facts["number"]
        self.pid: int = self.facts["pid"]

    def order(self, *words: object) -> None:
        self.connection.sendall(" ".join(map(str, words)).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """Its next message."""
        line = self.lines.readline()
        assert line, "the process has ended"
        said: dict[str, Any] = json.loads(line)
        return said

    def ask(self, *words: object) -> dict[str, Any]:
        self.order(*words)
        return self.hear()

    def ended(self) -> list[dict[str, Any]]:
        """Waits until it has ended, and gives what it still said."""
        return [json.loads(line) for line in self.lines]

    def release(self) -> None:
        """Nothing more will be told to it: ``late`` goes on at that."""
        self.connection.shutdown(socket.SHUT_WR)

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)


class Meeting:
    """Meeting place at which the processes of a program that the test starts introduce themselves."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "meeting")
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(self.address)
        self.socket.listen()
        self.processes: list[Process] = []
        self.program: subprocess.Popen[str] | None = None

    def run(self, *arguments: object, folder: Path, environment: Mapping[str, str] | None = None) -> Process:
        """Starts Python with these arguments, and meets the program's first process."""
        self.program = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self.meet()

    def meet(self) -> Process:
        """The next process that comes."""
        assert self.program is not None
        deadline = time.monotonic() + TIMEOUT
        while not select.select([self.socket], [], [], 1.0)[0]:
            assert self.program.poll() is None, self.program.communicate()[1]
            assert time.monotonic() < deadline, "no further process has come"
        connection, _ = self.socket.accept()
        self.processes.append(Process(connection))
        return self.processes[-1]

    def launched(self, first: Process, processes: int = 2) -> list[Process]:
        """Has the program launch so many virtual workers, each of which is in its work then."""
        assert first.ask("launch", processes) == {"extra": True}
        assert first.hear() == {"did": "launched"}
        others = sorted((self.meet() for _ in range(1, processes)), key=lambda process: process.number)
        for process in others:
            assert process.ask("launch", processes) == {"did": "launched"}
        return [first, *others]

    def ends(self) -> tuple[int, list[str], list[str]]:
        """Waits until the program has ended: its exit code, and what is on its standard output and error."""
        assert self.program is not None
        out, err = self.program.communicate(timeout=TIMEOUT)
        return self.program.returncode, out.splitlines(), err.splitlines()

    def close(self) -> None:
        """Leaves no process behind, also where a test failed."""
        for process in self.processes:
            if not self._has_ended(process):
                process.signal(signal.SIGKILL)
            process.lines.close()
            process.connection.close()
        self.socket.close()
        if self.program is not None:
            self.program.kill()
            self.program.communicate(timeout=TIMEOUT)

    @staticmethod
    def _has_ended(process: Process) -> bool:
        """True if its end of the connection is closed, so that its number may be another process's by now."""
        process.connection.settimeout(0)
        try:
            while data := process.connection.recv(4096):
                del data
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True


def stated(lines: Sequence[str]) -> list[str]:
    """Lines of standard error that the launcher itself wrote."""
    return [line for line in lines if line.startswith("hetpipe:")]
