"""The server's process: restarted where it was, gone when its parent is, and missed at once when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.process.server_process import ServerProcess
from lightning_hetpipe.server.process.signals import CHILD
from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.interface import CallRefused, Reply, Unreachable
from lightning_hetpipe.server.transport.security import Security
from tests.server.transports import PATIENCE, Phased, eventually

HERE = f"{__name__}:Counter"
SIZE = 40 << 20

# A parent that only starts the child and waits. Its own standard input, which somebody else holds open too, is the
# child's.
PARENT = """
import subprocess, sys, time
from lightning_hetpipe.server.process.signals import guarded
child = subprocess.Popen(guarded([sys.executable, "-c", sys.argv[1]]), start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""

# A parent that forks after it has started the server.
FORKING = """
import os, signal, sys
from lightning_hetpipe.server.process.server_process import ServerProcess
server = ServerProcess(sys.argv[1], {"first": 0})
server.start()
fork = os.fork()
if fork:
    print(server.pid, fork, flush=True)
signal.pause()
"""


class Counter(Phased):
    """Counts up; ``stall`` does not end, and ``environment`` says whether the header can be seen from outside."""

    def __init__(self, first: int) -> None:
        self.count = first

    def run(self, method: str, header: bytes, body: memoryview) -> Reply:
        if method == "stall":
            threading.Event().wait(PATIENCE)
        if method == "environment":
            told = Path("/proc/self/cmdline").read_bytes() + Path("/proc/self/environ").read_bytes()
            return Reply(json.dumps([os.getpid(), header in told]).encode())
        self.count += 1
        return Reply(str(self.count).encode(), [body])


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(HERE, {"first": 5}) as server:
        yield server
        pid = server.pid
    assert server.pid is None
    assert pid is not None
    assert not Path(f"/proc/{pid}").exists()


def exists(pid: int) -> bool:
    """True if the process runs. One that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_random_token_is_needed_and_not_to_be_seen(server: ServerProcess) -> None:
    assert server.security.token is not None
    assert server.security.token not in repr(server.security)
    with closing(GrpcChannel(server.address)) as stranger, pytest.raises(CallRefused, match="HETPIPE_TOKEN"):
        stranger.call("count", b"")
    with closing(GrpcChannel(server.address, server.security)) as channel:
        pid, seen = json.loads(channel.call("environment", server.security.token.encode()))
    assert pid == server.pid
    assert not seen


def test_a_killed_server_is_missed_at_once_and_comes_back_where_it_was(server: ServerProcess) -> None:
    with closing(GrpcChannel(server.address, server.security)) as channel, ThreadPoolExecutor(2) as threads:
        body, address, pid = bytearray(SIZE), server.address, server.pid
        assert pid is not None
        first = int(channel.call("count", b"", [memoryview(body)], [memoryview(body)]))
        assert int(channel.call("count", b"")) == first + 1
        waiting = [
            threads.submit(channel.call, "stall", b"", [memoryview(body[:size])], (), 10 * PATIENCE)
            for size in (0, SIZE)
        ]
        os.kill(pid, signal.SIGKILL)
        for call in waiting:
            assert isinstance(call.exception(PATIENCE), Unreachable)  # long before its deadline
        server.stop()
        server.start()
        assert server.address == address

        def counts() -> bool:
            try:
                return channel.call("count", b"", [memoryview(body)], [memoryview(body)]) == b"6"  # from the beginning
            except Unreachable:
                return False

        eventually(counts, "the channel does not find the server that came back")


@pytest.mark.slow
def test_an_address_that_is_taken_is_refused_with_the_servers_sentence(server: ServerProcess) -> None:
    second = ServerProcess(HERE, {"first": 5}, server.address)
    with pytest.raises(SettingError, match=f"address={server.address} cannot be had"):
        second.start()
    assert second.pid is None


@pytest.mark.slow
def test_a_handler_that_fails_is_said_to() -> None:
    with pytest.raises(RuntimeError, match="ended before it served"):
        ServerProcess(f"{__name__}:Nothing").start()


def test_an_open_address_is_refused_before_anything_starts() -> None:
    with pytest.raises(SettingError, match=r"address=0\.0\.0\.0:0 is open to other machines"):
        ServerProcess(HERE, address="0.0.0.0:0", security=Security(token="x"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel tells children that their parent has ended")
def test_a_server_that_still_starts_ends_when_its_parent_is_killed() -> None:
    """It waits to be told something, which somebody else still could: like one that imports, it looks at nothing."""
    asked = CHILD.format("unused").replace("import json", "print('asked', flush=True)\nimport json")
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, asked], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            assert parent.stdout.readline() == "asked\n"
            parent.kill()
            parent.wait(PATIENCE)
            eventually(lambda: not exists(pid), "the server has outlived its parent")
        finally:
            if exists(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_server_ends_when_its_parent_is_killed() -> None:
    """Also where the parent had forked a DataLoader's workers, which live on for a while."""
    with subprocess.Popen([sys.executable, "-c", FORKING, HERE], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, fork = map(int, parent.stdout.readline().split())
        try:
            parent.kill()
            parent.wait(PATIENCE)
            eventually(lambda: not exists(pid), "the server has outlived its parent")
            assert exists(fork)
        finally:
            for each in filter(exists, (pid, fork)):
                os.kill(each, signal.SIGKILL)
