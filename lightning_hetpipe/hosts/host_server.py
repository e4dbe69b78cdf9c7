"""Server of hosts: for each connection it starts a process that is the host of one stage."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts.host_process import CHILD
from lightning_hetpipe.hosts.secured_socket import keep_alive
from lightning_hetpipe.server.process.running import Signals
from lightning_hetpipe.server.transport.security import Security, split

MOST_HOSTS = 64
"""Largest number of processes at a time; further connections are closed."""

REAPING = 1.0
"""Seconds between looks at which of them have ended."""

ENDING = 5.0
"""Seconds in which hosts end that were asked to."""


def serve(address: str, security: Security, ready: Callable[[str], None]) -> int:
    """Serve until a signal, whose number is returned; must be called in the main thread.

    Args:
        address: Where to listen; port 0 takes any that is free.
        security: Certificates and token, which each host checks.
        ready: Is called with the address, once it serves.

    Raises:
        SettingError: if the address cannot be had, or the certificates cannot be used.
    """
    if security.encrypted:
        security.read()
    host, port = split(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as undo, Signals() as signals:
        try:
            listener = undo.enter_context(socket.create_server((host, port), family=family))
        except OSError as error:
            raise SettingError(
                f"address={address} cannot be had ({error.strerror}); is another hetpipe-host running there? Give"
                " another port, or 0 for any that is free."
            ) from None
        spelled = f"[{host}]" if ":" in host else host
        ready(f"{spelled}:{listener.getsockname()[1]}")
        hosts = _Hosts(security)
        undo.callback(hosts.end)
        waiting = undo.enter_context(selectors.DefaultSelector())
        waiting.register(listener, selectors.EVENT_READ)
        waiting.register(signals, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select(REAPING if hosts.reap() else None):
                if key.fileobj is signals:
                    return signals.read()
                with suppress(OSError), listener.accept()[0] as connection:
                    hosts.start(connection)


class _Hosts:
    """The processes."""

    def __init__(self, security: Security) -> None:
        self._told = json.dumps({"path": [os.path.abspath(each) for each in sys.path], "security": asdict(security)})
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, connection: socket.socket) -> None:
        """Start the host of ``connection``."""
        if self.reap() >= MOST_HOSTS:
            return
        keep_alive(connection)
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(connection.fileno()), "hetpipe-host"],
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
        self._running = [each for each in self._running if each.poll() is None]
        return len(self._running)

    def end(self) -> None:
        """End all of them."""
        for each in self._running:
            if each.poll() is None:
                each.send_signal(signal.SIGTERM)
        for each in self._running:
            try:
                each.wait(ENDING)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
