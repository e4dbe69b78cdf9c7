"""The transports side by side, a handler that can be told what to do, and certificates."""

from __future__ import annotations

import atexit
import shutil
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.grpc_server import GrpcServer
from lightning_hetpipe.server.transport.interface import CallRefused, Channel, Handler, IncomingCall, Reply
from lightning_hetpipe.server.transport.security import Security
from lightning_hetpipe.server.transport.shared_memory import memory
from tests.support.certificates import make

KINDS = ("grpc", "tls", "block")
PATIENCE = 30.0
"""Seconds after which a test fails that waits for something."""


class Phased:
    """A handler whose calls are one ``open``, and if that returns, either one ``run`` or one ``abandoned``."""

    def serve(self, call: IncomingCall) -> Reply:
        body = self.open(call.method, call.header, call.size, call.offered)
        try:
            call.receive(body)
        except BaseException:
            self.abandoned(call.method, call.header, body)
            raise
        return self.run(call.method, call.header, body)

    def open(self, method: str, header: bytes, size: int, offered: memoryview | None) -> memoryview:
        return memoryview(bytearray(size))

    def run(self, method: str, header: bytes, body: memoryview) -> Reply:
        raise NotImplementedError

    def abandoned(self, method: str, header: bytes, body: memoryview) -> None:
        """Nothing to give back."""


class Desk(Phased):
    """A handler that records what it is called for, and waits where a test wants it to.

    Methods: ``echo``; ``keep``, which leaves the body where the client has it, if it may; ``lend``, which does
    so and sends nothing back; ``refuse`` in open,
    ``decline`` in run; ``fail`` in run; ``hold`` in run, ``hold open`` in open, until the test sets ``go``.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []
        self.held = threading.Semaphore(0)
        """Released once for each call that begins to wait."""
        self.go = threading.Event()
        self.kept: list[memoryview] = []
        self.abandonments = threading.Semaphore(0)
        self._lock = threading.Lock()

    def _note(self, what: str, method: str, size: int) -> None:
        with self._lock:
            self.calls.append((what, method, size))

    def _hold(self) -> None:
        self.held.release()
        assert self.go.wait(PATIENCE), "nobody said go"

    def open(self, method: str, header: bytes, size: int, offered: memoryview | None = None) -> memoryview:
        if method == "refuse":
            raise CallRefused("not today, because of the weather")
        if method == "hold open":
            self._hold()
        self._note("open", method, size)
        if method in ("keep", "lend") and offered is not None:
            self.kept.append(offered)
            return offered
        return memory(size)

    def run(self, method: str, header: bytes, body: memoryview) -> Reply:
        self._note("run", method, body.nbytes)
        if method == "decline":
            raise CallRefused("too late")
        if method == "fail":
            raise ValueError("a bug")
        if method == "hold":
            self._hold()
        return Reply(header[::-1], [] if method == "lend" else [body[:7], body[7:7], body[7:]])

    def abandoned(self, method: str, header: bytes, body: memoryview) -> None:
        self._note("abandoned", method, body.nbytes)
        self.abandonments.release()

    def ran(self) -> list[str]:
        """The methods that were run, in order."""
        return [method for what, method, _ in self.calls if what == "run"]


class Shelf(Phased):
    """A handler whose replies have a body that lies in shared memory, or in its own."""

    def __init__(self, size: int) -> None:
        self.weights = memory(size)
        self.runs = 0

    def open(self, method: str, header: bytes, size: int, offered: memoryview | None = None) -> memoryview:
        return memory(size) if offered is None else offered

    def run(self, method: str, header: bytes, body: memoryview) -> Reply:
        self.runs += 1
        if method == "write":
            self.weights[:] = body
            return Reply(b"")
        return Reply(b"there", [self.weights])


def serve(kind: str, handler: Handler, address: str | None = None) -> GrpcServer:
    """A server of this kind, to be entered; ``address`` as an earlier one's."""
    return GrpcServer(handler, address or "127.0.0.1:0", security(kind))


def connect(kind: str, address: str) -> Channel:
    """A channel to a server of this kind."""
    return GrpcChannel(address, security(kind), shared_memory=kind == "block")


def security(kind: str) -> Security | None:
    """Arguments of servers and channels of this kind."""
    if kind != "tls":
        return None
    folder = certificates()
    return Security(str(folder / "ca.pem"), str(folder / "certificate.pem"), str(folder / "key.pem"), token="a-token")


@cache
def certificates() -> Path:
    """A folder with ca.pem, and certificate.pem with key.pem, which it signed for 127.0.0.1 and localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made with the program openssl, which is not installed")
    folder = Path(mkdtemp(prefix="hetpipe-certificates-"))
    atexit.register(shutil.rmtree, folder)
    make(folder)
    return folder


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Returns once this holds; fails after a while."""
    deadline = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, what
        pause.wait(0.01)
