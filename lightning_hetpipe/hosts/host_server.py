"""Server of hosts: for each connection it starts a process that is the host of one stage, and never outlives it."""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Protocol, Self

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts.host_child import CHILD, LONGEST_REASON
from lightning_hetpipe.hosts.secured_socket import INTRODUCING, listen, unlike
from lightning_hetpipe.server.process.server_process import how
from lightning_hetpipe.server.process.signals import Signals, guarded
from lightning_hetpipe.server.transport.rejections import Rejections
from lightning_hetpipe.server.transport.security import Security, joined, split

_FIRST = 4  # bytes that are looked at
_PAUSE = 0.1  # seconds, when there is no descriptor for another connection


class WaitingCallers:
    """Callers at ``listener``, of whom at most ``most`` wait.

    Args:
        selector: Watches ``listener``, and those that are silent.
        security: What callers have to show.
        turned_away: Is told of those that are closed, and why.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        security: Security,
        most: int,
        turned_away: Callable[[str, str], None],
    ) -> None:
        self._listener, self._selector, self._security, self._most = listener, selector, security, most
        self._turned_away = turned_away
        self._silent: dict[socket.socket, tuple[float, str]] = {}
        self._speak: deque[tuple[socket.socket, str]] = deque()
        self._pause = threading.Event()

    def take(self) -> None:
        """Take a connection, for which another one may be closed."""
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._drop():
                self._pause.wait(_PAUSE)
            return
        while len(self._silent) + len(self._speak) >= self._most:
            if not self._drop():
                connection.close()
                return
        peer = f"tcp:{joined(address[0], address[1])}"
        self._silent[connection] = time.monotonic() + INTRODUCING, peer
        self._selector.register(connection, selectors.EVENT_READ)

    def hear(self, connection: socket.socket) -> None:
        """Note that ``connection`` says something, or has ended."""
        if connection not in self._silent:  # it was closed a moment ago
            return
        _, peer = self._forget(connection)
        try:
            first = connection.recv(_FIRST, socket.MSG_PEEK)
        except OSError:
            first = b""
        why = unlike(first, self._security)
        if first and why is None:
            self._speak.append((connection, peer))
            return
        connection.close()
        if first and why is not None:
            self._turned_away(peer, why)

    def next(self) -> tuple[socket.socket, str] | None:
        """The connection that has said something first, and who is at its other end."""
        return self._speak.popleft() if self._speak else None

    def expire(self) -> float | None:
        """Close those that were silent for too long; gives the seconds until the next one was."""
        while self._silent:
            left = next(iter(self._silent.values()))[0] - time.monotonic()
            if left > 0:
                return left
            self._drop()
        return None

    def close(self) -> None:
        """Close all of them."""
        for connection in [*self._silent]:
            self._forget(connection)
            connection.close()
        while self._speak:
            self._speak.popleft()[0].close()

    def _drop(self) -> bool:
        """Close the one that was silent for longest, if there is one."""
        connection = next(iter(self._silent), None)
        if connection is None:
            return False
        _, peer = self._forget(connection)
        with suppress(OSError):
            connection.close()
        self._turned_away(peer, "it has connected and said nothing")
        return True

    def _forget(self, connection: socket.socket) -> tuple[float, str]:
        self._selector.unregister(connection)
        return self._silent.pop(connection)


MOST_HOSTS = 64
"""Largest number of processes at a time; further connections are closed."""

MOST_ASKING = 16
"""Largest number of these that have yet to let in who has connected; further connections wait."""

MOST_WAITING = 64
"""Largest number of connections that wait."""

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
                f"address={self.address} cannot be had ({error.strerror}), as if another hetpipe-host ran there; give"
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
        rejections = Rejections(partial(print, file=sys.stderr, flush=True), program="hetpipe-host")
        with selectors.DefaultSelector() as selector, ExitStack() as undo:
            selector.register(until, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            callers = WaitingCallers(self._listener, selector, self._security, _most_waiting(), rejections.note)
            undo.callback(callers.close)
            hosts = self._hosts
            undo.callback(hosts.forget)
            while True:
                reaps = REAPING if hosts.reap() else None
                times = [each for each in (callers.expire(), reaps) if each is not None]
                for key, _ in selector.select(min(times, default=None)):
                    if key.fileobj is until:
                        return
                    if key.fileobj is self._listener:
                        callers.take()
                    elif isinstance(key.fileobj, socket.socket):
                        callers.hear(key.fileobj)
                    else:
                        selector.unregister(key.fileobj)
                        peer, why = hosts.heard(key.fd)
                        if why:
                            rejections.note(peer, why)
                while hosts.asking < MOST_ASKING and (found := callers.next()) is not None:
                    with suppress(OSError), found[0]:
                        if (reasons := hosts.start(*found)) is not None:
                            selector.register(reasons, selectors.EVENT_READ)


def _most_waiting() -> int:
    """Connections that may wait: few enough that there are descriptors to start processes with."""
    return min(MOST_WAITING, os.sysconf("SC_OPEN_MAX") // 4)


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
        self._reasons: dict[int, str] = {}

    @property
    def asking(self) -> int:
        """Processes that do not know yet whether they let in who has connected."""
        return len(self._reasons)

    def start(self, connection: socket.socket, peer: str) -> int | None:
        """Start the host of ``connection``; gives the pipe by which it says why it lets nobody in."""
        if self.reap() >= MOST_HOSTS:
            return None
        reasons, its = os.pipe()
        try:
            process = subprocess.Popen(
                guarded([sys.executable, "-c", CHILD, "hetpipe-host", str(connection.fileno()), str(its)]),
                stdin=subprocess.PIPE,
                pass_fds=[connection.fileno(), its],
                start_new_session=True,
            )
        except OSError:
            os.close(reasons)
            raise
        finally:
            os.close(its)
        self._reasons[reasons] = peer
        self._running.append(process)
        assert process.stdin is not None
        with suppress(OSError), process.stdin as pipe:
            pipe.write(self._told.encode())  # a command line could be read by other users
        return reasons

    def heard(self, reasons: int) -> tuple[str, str]:
        """Give the caller, and the reason for not letting it in; empty if it was, or the process has just ended."""
        with open(reasons, "rb", buffering=0) as pipe:
            return self._reasons.pop(reasons), pipe.read(LONGEST_REASON).decode(errors="replace")

    def forget(self) -> None:
        """Hear no more reasons."""
        while self._reasons:
            os.close(self._reasons.popitem()[0])

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
