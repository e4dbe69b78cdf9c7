"""Processes that torchrun or the like has started on one machine, with servers of somebody else's or of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_hetpipe.server.process.server_process import ServerProcess
from lightning_hetpipe.server.transport.security import Security
from tests.server.transports import certificates
from tests.support.equality import assert_same
from tests.wsp.launch import ROOT, SECONDS, Job, each_started, finished, left_behind, start
from tests.wsp.test_exact import check, expected


@pytest.mark.slow
def test_two_processes_and_two_servers(tmp_path: Path) -> None:
    rooms = ("lightning_hetpipe.server.process.sessions:Sessions", {"lease": 30.0})
    with ServerProcess(*rooms) as first, ServerProcess(*rooms, security=first.security) as second:
        job = Job(tmp_path, more={"wsp": {"servers": [first.address, second.address]}})
        environments = []
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
            environments.append(environment)
        codes, said = each_started(job, environments)
    assert codes == [0, 0], said
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=False)["end"].weights for rank in range(2))
    assert_same(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("token", ["right", "wrong"])
def test_a_launch_on_a_server_with_certificates(token: str, tmp_path: Path) -> None:
    folder = certificates()
    variables = {f"HETPIPE_{name.upper()}": str(folder / f"{name}.pem") for name in ("ca", "certificate", "key")}
    shown = Security(token="right").from_environment(variables)
    with ServerProcess("lightning_hetpipe.server.process.sessions:Sessions", {"lease": 30.0}, security=shown) as server:
        job = Job(tmp_path, more={"wsp": {"servers": [server.address]}, "trainer": {"max_epochs": 1}})
        if token == "right":
            found, _ = finished(job, HETPIPE_TOKEN=token, **variables)
            check(job, found, expected(job, 3, 1))
        else:
            done = start(job, HETPIPE_TOKEN=token, **variables)
            assert done.returncode == 1
            assert "SettingError: this virtual worker was refused: the server at" in done.stderr
            assert "the token is missing or wrong; give the server's as HETPIPE_TOKEN\n" in done.stderr
        assert left_behind(job) == []


@pytest.mark.slow
def test_torchrun_needs_no_more_than_for_ddp(tmp_path: Path) -> None:
    """The first process starts the server, on loopback, and tells the other one where."""
    job = Job(tmp_path, stages=[2, 3], more={"virtual_workers": 1})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, *job.command()[1:]], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    check(job, job.written(), expected(job, 3))
