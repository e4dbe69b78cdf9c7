"""Server of hosts: for each connection it starts a process that is the host of one stage, and never outlives it."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import Protocol, Self

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts.host_process import CHILD
from lightning_hetpipe.hosts.secured_socket import listen
from lightning_hetpipe.server.process.parent_death import guarded
from lightning_hetpipe.server.process.server_process import how
from lightning_hetpipe.server.process.signals import Signals
from lightning_hetpipe.server.transport.security import Security, joined, split

MOST_HOSTS = 64
"""Largest number of processes at a time; further connections are closed."""

REAPING = 1.0
"""Seconds between looks at which of them have ended."""


class Watched(Protocol):
    """A file of the operating system."""

    def fileno(self) -> int: ...


class HostServer:
    """Server of hosts between entering and leaving the context, at the end of which all of its hosts end.

    Args:
        address: Where to listen; port 0 takes any that is free.
        security: Certificates and token, which each host checks.

    Raises:
        SettingError: if the certificates cannot be used; on entering, if the address cannot be had.
    """

    def __init__(self, address: str, security: Security) -> None:
        if security.encrypted:
            security.read()
        self.address = address
        self._security = security
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        host, port = split(self.address)
        try:
            self._listener = listen(host, port)
        except OSError as error:
            raise SettingError(
                f"address={self.address} cannot be had ({error.strerror}); is another hetpipe-host running there? Give"
                " another port, or 0 for any that is free."
            ) from None
        self.address = joined(host, self._listener.getsockname()[1])
        self._hosts = _Hosts(self._security)
        self._undo.enter_context(self._listener)
        self._undo.callback(self._hosts.end)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def run(self, until: Watched) -> None:
        """Serve until there is something to read from ``until``; the thread that calls it must outlive the hosts."""
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._listener, selectors.EVENT_READ)
            waiting.register(until, selectors.EVENT_READ)
            while True:
                for key, _ in waiting.select(REAPING if self._hosts.reap() else None):
                    if key.fileobj is until:
                        return
                    with suppress(OSError), self._listener.accept()[0] as connection:
                        self._hosts.start(connection)


def serve(address: str, security: Security, ready: Callable[[str], None]) -> int:
    """Serve until a signal, whose number is returned; must be called in the main thread.

    Args:
        address, security: As of :class:`HostServer`.
        ready: Is called with the address, once it serves.

    Raises:
        SettingError: as :class:`HostServer` does.
    """
    with Signals() as signals, HostServer(address, security) as server:
        ready(server.address)
        server.run(signals)
        return signals.read()


@contextmanager
def serving(address: str, security: Security) -> Iterator[str]:
    """Serve from a thread of its own meanwhile; gives the address.

    Raises:
        SettingError: as :class:`HostServer` does.
    """
    ours, its = socket.socketpair()
    with ours, its, HostServer(address, security) as server:
        thread = threading.Thread(target=server.run, args=(its,), name="hetpipe-host-server", daemon=True)
        thread.start()
        try:
            yield server.address
        finally:
            ours.close()
            thread.join()


class _Hosts:
    """The processes."""

    def __init__(self, security: Security) -> None:
        self._told = json.dumps({"path": [os.path.abspath(each) for each in sys.path], "security": asdict(security)})
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, connection: socket.socket) -> None:
        """Start the host of ``connection``."""
        if self.reap() >= MOST_HOSTS:
            return
        process = subprocess.Popen(
            guarded([sys.executable, "-c", CHILD, str(connection.fileno()), "hetpipe-host"]),
            stdin=subprocess.PIPE,
            pass_fds=[connection.fileno()],
            start_new_session=True,
        )
        assert process.stdin is not None
        with suppress(OSError), process.stdin as pipe:
            pipe.write(self._told.encode())  # a command line could be read by other users
        self._running.append(process)

    def reap(self) -> int:
        """Let the system forget those that have ended; gives the number of the others."""
        for each in self._running:
            if (code := each.poll()) is not None and code < 0:
                print(f"hetpipe-host: process {each.pid}, of a stage, {how(code)}.", file=sys.stderr, flush=True)
        self._running = [each for each in self._running if each.returncode is None]
        return len(self._running)

    def end(self) -> None:
        """End all of them."""
        for each in self._running:
            each.kill()  # they leave SIGTERM to their leaders
        for each in self._running:
            each.wait()
