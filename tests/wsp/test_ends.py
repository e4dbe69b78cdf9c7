"""Ends of launches for want of memory, disk or a port: one message, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetpipe.server.process.server_process import ServerProcess
from lightning_hetpipe.server.transport.security import Security
from tests.wsp.launch import Job, free_port, left_behind, on_nodes, start

pytestmark = pytest.mark.slow

ROOM = 96 << 10
"""Bytes of the small file system: a checkpoint of the task takes half of it."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system that has little room."""
    folder = tmp_path / "small"
    folder.mkdir()
    with small_file_system(folder):
        yield folder


@contextmanager
def small_file_system(folder: Path) -> Iterator[None]:
    """Within it there is little room in ``folder``."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "hetpipe-test", str(folder)]
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("a small file system takes root, and the program mount")
    made = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if made.returncode:
        pytest.skip(f"this machine mounts no small file system: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=60)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_stage_runs_out_of_memory(worker: int, tmp_path: Path) -> None:
    job = Job(tmp_path, more={"wants_memory": (worker, 1, "forward", 4)})
    done = start(job)
    assert left_behind(job) == []
    assert done.returncode == 1
    assert done.stderr.count("\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.\n") == 1, (
        done.stderr
    )
    ran_out = "HetPipeStrategy: stage 1 ran out of memory on cpu in the forward of minibatch 4"
    assert done.stderr.count(ran_out) == 1, done.stderr
    assert "set in_flight below 3, recompute=True, or smaller batches, or give more devices" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("somebody", ["fill", "fill most"])
def test_the_disk_is_full_while_a_checkpoint_is_saved(somebody: str, small_disk: Path) -> None:
    """The first checkpoint fits; then somebody else fills the disk, wholly, or so that half of the next one fits."""
    acts = [("all", 2, "save"), (0, 3, somebody), ("all", 4, "save")]
    job = Job(small_disk, more={"trainer": {"max_epochs": 1}, "acts": acts})
    done = start(job)
    assert left_behind(job) == []
    assert done.returncode == 1, done.stderr
    said = "No space left on device; the checkpoint was not written, and what was there before is as it was: make room"
    assert f"OSError: [Errno 28] {said}" in done.stderr
    assert f"'{small_disk}/saved.ckpt'" in done.stderr
    assert "virtual worker 1 (process" not in done.stderr, "its error would say the same"
    assert sorted(path.name for path in small_disk.iterdir()) == ["filling", "saved.ckpt"]
    assert torch.load(small_disk / "saved.ckpt", weights_only=True)["global_step"] == 2


def ended(tmp_path: Path, port: int) -> list[tuple[int, str, str]]:
    """Results of two nodes, whose coordinator should listen on ``port``."""
    more: dict[str, Any] = {"virtual_workers": 1, "trainer": {"num_nodes": 2}, "timeout": 6}
    job = Job(tmp_path, more={**more, "wsp": {"join_timeout": 6.0}})
    found = on_nodes(job, MASTER_PORT=str(port - 1))
    assert left_behind(job) == []
    return found


def refused(said: str, port: int) -> bool:
    begin = f"SettingError: this node's server cannot listen on 127.0.0.1:{port}: node 0's listens on MASTER_ADDR, "
    return begin in said and "must be free (the server of an earlier run may still have it)" in said


def test_the_port_of_the_server_is_in_use(tmp_path: Path) -> None:
    port = free_port() + 1
    with socket.create_server(("127.0.0.1", port)):
        (first, _, said), (second, _, heard) = ended(tmp_path, port)
    assert (first, second) == (1, 1)
    assert refused(said, port), said
    assert f"for 6 s for an answer: the server at 127.0.0.1:{port} " in heard
    assert f"is the program running that starts the server at 127.0.0.1:{port}, and may this machine reach it?" in heard


@pytest.mark.parametrize("token", ["one", "another"])
def test_a_server_of_another_run_is_at_the_address(token: str, tmp_path: Path) -> None:
    """It may have the same token, and a virtual worker of the new run comes to it; the first of that never does."""
    port = free_port() + 1
    serving = "lightning_hetpipe.server.process.sessions:Sessions", {"lease": 30.0}, f"127.0.0.1:{port}"
    with ServerProcess(*serving, Security(token=token)):
        (first, _, said), (second, _, heard) = ended(tmp_path, port)
    assert (first, second) == (1, 1)
    assert refused(said, port), said
    if token == "one":
        assert "VW 1 has waited 6 s for VW 0 (node 0) to join; look at what happened to each of them" in heard
    else:
        assert f"this virtual worker was refused: the server at 127.0.0.1:{port} refused the call" in heard
        assert "the token is missing or wrong; give the server's as HETPIPE_TOKEN" in heard
