"""Connections that a host server has taken, and for which no process was started yet.

Who connects speaks first. So a connection that says nothing has no process, but a descriptor for a while: the one that
was silent for longest is closed where there are too many.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from lightning_hetpipe.hosts.secured_socket import INTRODUCING, unlike
from lightning_hetpipe.server.transport.security import Security, joined

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
