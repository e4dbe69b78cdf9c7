"""Launches of virtual workers as processes of their own, on servers of the test's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_hetpipe.server.process import ServerProcess
from lightning_hetpipe.strategy.ranks import VARIABLE

ROOT = Path(__file__).parent.parent.parent
SECONDS = 180


@dataclass
class Job:
    """What ``tests.wsp.worker`` is told."""

    folder: Path
    task: str = "mlp"
    lengths: Sequence[int] = (5, 5)
    stages: Any = 2
    in_flight: Any = 3
    more: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        told = {name: value for name, value in vars(self).items() if name != "more"}
        return json.dumps({**told, "folder": str(self.folder), "lengths": list(self.lengths), **self.more})


def run(job: Job, servers: int = 1) -> list[dict[str, Any]]:
    """Runs ``job`` to its end; gives what each virtual worker wrote."""
    size = len(job.lengths)
    with ExitStack() as stack:
        started = []
        for _ in range(servers):
            server = ServerProcess("lightning_hetpipe.server.rooms:Rooms", {"lease": 30.0})
            if started:
                server.security = started[0].security
            started.append(stack.enter_context(server))
        addresses = " ".join(server.address for server in started)
        token = started[0].security.token or ""
        processes = []
        for worker in range(size):
            environment = {**os.environ, VARIABLE: f"{worker}/{size}", "HETPIPE_SERVERS": addresses}
            environment["HETPIPE_TOKEN"] = token
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.wsp.worker", job.text()],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.kill)
            processes.append(process)
        said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size, "\n".join(said)
    return [torch.load(job.folder / f"{worker}.pt", weights_only=False) for worker in range(size)]
