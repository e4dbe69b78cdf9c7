"""Server of hosts: for each connection it starts a process that is the host of one stage, and never outlives it.

Each connection has a thread, which waits until the caller speaks, starts the process, and stays until the process ends.
The kernel ends a child with the *thread* that forked it. The process lets the caller in before it imports torch.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from types import FrameType
from typing import Any, Self

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts.secured_socket import INTRODUCING, Connection, Door, Refused, admit, listen, unlike
from lightning_hetpipe.server.process.signals import how, search_path, start_child
from lightning_hetpipe.server.transport.security import Rejections, Security, joined, split

MOST_HOSTS = 64
"""Largest number of processes at a time. Further connections are closed."""

MOST_ASKING = 16
"""Largest number of these processes whose caller is not let in yet. Further connections wait."""

MOST_WAITING = 64
"""Largest number of connections that wait, if descriptors are left to start processes beside them."""

LONGEST_REASON = 1000
"""Largest bytes of the reason for a refusal."""

_FIRST = 4  # bytes that are looked at
_SILENT = "it has connected and said nothing"


class HostServer:
    """Server of hosts as a context manager, at whose end all its hosts end.

    It listens at ``address``, where port 0 takes any free port. Its hosts check the login by ``security``.

    Raises:
        SettingError: if the certificates cannot be used, or on entering, if the address is not available.
    """

    def __init__(self, address: str, security: Security) -> None:
        if security.encrypted:
            security.read()
        self.address = address
        self._security = security
        self._told = {"security": asdict(security), **search_path()}
        self._rejections = Rejections(partial(print, file=sys.stderr, flush=True), program="hetpipe-host")
        self._lock = threading.Lock()
        self._asking = threading.Semaphore(MOST_ASKING)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False

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
        most = min(MOST_WAITING, os.sysconf("SC_OPEN_MAX") // 4)
        self._door = Door(self._listener, self._serve, most, "hetpipe-host-server")
        self._door.open()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ended = True
            for process in self._running:
                process.kill()  # they leave SIGTERM to their leaders
        self._door.close()

    def _serve(self, connection: socket.socket, host: str) -> None:
        """Start the host of ``connection``, if the caller may be let in, and wait until the host ends."""
        process: subprocess.Popen[bytes] | None = None
        if (why := self._why_not(connection)) is None:
            with self._asking, suppress(OSError):
                reasons, its = os.pipe()
                with open(reasons, "rb") as pipe:
                    try:
                        process = self._host_of(connection, its)
                    finally:
                        os.close(its)
                        self._door.settle(connection)
                        connection.close()  # whose end the caller finds when the host has ended
                    why = pipe.read(LONGEST_REASON).decode(errors="replace")
        if why:
            self._rejections.note(f"tcp:{joined(host, 0)}", why)
        if process is None:
            return
        code = process.wait()
        with self._lock:
            self._running.discard(process)
        if code < 0 and not self._ended:
            print(f"hetpipe-host: process {process.pid}, of a stage, {how(code)}.", file=sys.stderr, flush=True)

    def _why_not(self, connection: socket.socket) -> str | None:
        """Wait until the caller speaks, and return why it is not let in, or None."""
        connection.settimeout(INTRODUCING)
        try:
            first = connection.recv(_FIRST, socket.MSG_PEEK)
        except TimeoutError:
            return _SILENT
        except OSError:
            first = b""
        if not self._door.heard(connection):
            return "" if self._ended else _SILENT
        connection.settimeout(None)
        return unlike(first, self._security) if first else ""

    def _host_of(self, connection: socket.socket, reasons: int) -> subprocess.Popen[bytes] | None:
        """Start the host of ``connection``, which writes into the pipe ``reasons`` why it refuses the caller."""
        with self._lock:
            if self._ended or len(self._running) >= MOST_HOSTS:
                return None
            descriptor = connection.fileno()
            process = start_child(__name__, "hetpipe-host", pass_fds=[descriptor, reasons])
            self._running.add(process)
        assert process.stdin is not None
        with suppress(OSError), process.stdin as pipe:
            pipe.write(json.dumps({**self._told, "descriptor": descriptor, "reasons": reasons}).encode() + b"\n")
        return process


def child(security: dict[str, Any], descriptor: int, reasons: int) -> None:
    """Run a host in this process at the socket ``descriptor``, to callers that ``security`` admits.

    ``reasons`` is a pipe for the reason of a refusal. It is closed when the decision is known.
    """
    _end_with(os.getppid())
    raw, access = socket.socket(fileno=descriptor), Security(**security)
    try:
        connection = _admitted(raw, access, reasons)
        if connection is not None:
            # Only now: an unknown caller costs a bare interpreter for a moment, but not the memory and time of torch.
            from lightning_hetpipe.hosts.stage_host import Host
            from lightning_hetpipe.hosts.wire import Wire

            if not Host(Wire(connection), access, raw.getsockname()[0]).run():
                os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # whatever a stage's thread computes, nobody waits for it


def _end_with(parent: int) -> None:
    """Make SIGTERM end this process only if the process ``parent`` has ended.

    Launchers that signal all processes of a run, such as SLURM, also reach hosts, whose weights must still be saved.
    """

    def told(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            os._exit(128 + number)

    signal.signal(signal.SIGTERM, told)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _admitted(raw: socket.socket, security: Security, reasons: int) -> Connection | None:
    """Return the connection, if the caller is let in, or None."""
    try:
        return admit(raw, security, INTRODUCING)[0]
    except (Refused, OSError) as refused:
        with suppress(OSError):  # hetpipe-host ends
            os.write(reasons, str(refused).encode(errors="replace")[:LONGEST_REASON])
        return None
    finally:
        os.close(reasons)
