"""Processes that torchrun or the like has started, on servers that somebody else has started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_hetpipe.server.process import ServerProcess
from tests import oracle
from tests.wsp.launch import ROOT, SECONDS, Job


@pytest.mark.slow
def test_two_processes_and_two_servers(tmp_path: Path) -> None:
    rooms = ("lightning_hetpipe.server.rooms:Rooms", {"lease": 30.0})
    with ServerProcess(*rooms) as first, ServerProcess(*rooms, security=first.security) as second:
        job = Job(tmp_path, more={"wsp": {"servers": [first.address, second.address]}})
        processes = []
        for rank in range(2):
            told: dict[str, object] = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "GROUP_RANK": 0,
                "WORLD_SIZE": 2,
                "LOCAL_WORLD_SIZE": 2,
            }
            told |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "none"}
            environment = {**os.environ, **{name: str(value) for name, value in told.items()}}
            environment["HETPIPE_TOKEN"] = first.security.token or ""
            command = [sys.executable, "-m", "tests.wsp.worker", job.text()]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
        try:
            said = [process.communicate(timeout=SECONDS)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=False)["end"] for rank in range(2))
    assert oracle.difference(one, other) is None
