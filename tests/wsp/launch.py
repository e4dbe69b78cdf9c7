"""Launches of virtual workers, each a process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support import forks, namespaces

ROOT = Path(__file__).parent.parent.parent
SECONDS = 300
MARK = "HETPIPE_TEST_FOLDER"
"""The environment variable by which the processes of a launch are known, however many removes from here."""


@dataclass
class Job:
    """Arguments of ``tests.wsp.worker``, and the seconds after which it hangs."""

    folder: Path
    task: str = "mlp"
    lengths: Sequence[int] = (5, 5)
    stages: Any = 2
    in_flight: Any = 3
    more: dict[str, Any] = field(default_factory=dict)
    seconds: float = SECONDS

    def text(self) -> str:
        told = {name: value for name, value in vars(self).items() if name not in ("more", "seconds")}
        return json.dumps({**told, "folder": str(self.folder), "lengths": list(self.lengths), **self.more})

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.wsp.worker", self.text()]

    def written(self) -> list[dict[str, Any]]:
        """Files that each virtual worker wrote."""
        return [torch.load(self.folder / f"{worker}.pt", weights_only=False) for worker in range(len(self.lengths))]

    def written_so_far(self) -> list[dict[str, Any] | None]:
        """Likewise, None for one that has not come to its end."""
        paths = [self.folder / f"{worker}.pt" for worker in range(len(self.lengths))]
        return [torch.load(path, weights_only=False) if path.exists() else None for path in paths]


def start(*jobs: Job, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs ``jobs``, of as many virtual workers each, in one launch to its end, whatever that is.

    ``variables`` are of its environment, beside those of the test.
    """
    arguments = [*jobs[0].command()[1:], *(job.text() for job in jobs[1:])]
    environment = {**os.environ, **variables, MARK: str(jobs[0].folder)}
    seconds = sum(job.seconds for job in jobs)
    try:
        return forks.run(*arguments, environment=environment, timeout=seconds, starting=forks.LAUNCHES)
    except subprocess.TimeoutExpired as late:
        said = (late.stderr or b"").decode(errors="replace")  # bytes, whatever was asked for
        raise AssertionError(f"not done after {seconds} s, having said:\n{said}") from None


def each_started(job: Job, environments: Sequence[Mapping[str, str]]) -> tuple[list[int], str]:
    """Runs ``job`` in processes that the test starts, one in each of ``environments``: return codes, and stderr."""
    pipe = subprocess.PIPE
    processes = [
        forks.Popen(job.command(), cwd=ROOT, env=environment, stderr=pipe, text=True, starting=forks.LAUNCHES)
        for environment in environments
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "\n".join(said)


def on_nodes(job: Job, nodes: int = 2, **variables: str) -> list[tuple[int, str, str]]:
    """Runs ``job`` by one command for each node, all of them on loopback, and a server on each: as ``finished`` has it.

    Processes are those of ``left_behind``.
    """
    port = str(free_port())
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HETPIPE_TOKEN": "one"}
    environment = {**os.environ, **meeting, **variables}
    environment[MARK] = str(job.folder)
    pipe = subprocess.PIPE
    processes = [
        forks.Popen(
            job.command(),
            cwd=ROOT,
            env={**environment, "NODE_RANK": str(node)},
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
            starting=forks.LAUNCHES,
        )
        for node in range(nodes)
    ]
    try:
        return namespaces.finished(processes, SECONDS)
    finally:
        for process in processes:
            process.kill()


def free_port(number: int = 3) -> int:
    """The first of ``number`` that are free: of rendezvous, of node 0's server, and of the meeting of nodes."""
    while True:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port: int = found.getsockname()[1]
        try:
            for each in range(port, port + number):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            continue
        return port


def left_behind(job: Job) -> list[str]:
    """The processes of the launch of ``job`` that still run, also those that have lost their parent."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={job.folder}\0".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().decode())
        except OSError:
            continue
    return found


def finished(job: Job, **variables: str) -> tuple[list[dict[str, Any]], str]:
    """Runs ``job`` to its end; gives what each virtual worker wrote, and what was said on stderr."""
    done = start(job, **variables)
    assert done.returncode == 0, done.stderr
    return job.written(), done.stderr


def run(job: Job) -> list[dict[str, Any]]:
    """Runs ``job`` to its end; gives what each virtual worker wrote."""
    return finished(job)[0]


def run_all(*jobs: Job) -> list[list[dict[str, Any]]]:
    """Runs ``jobs`` one after the other in one launch; gives what each virtual worker wrote in each."""
    done = start(*jobs)
    assert done.returncode == 0, done.stderr
    return [job.written() for job in jobs]
