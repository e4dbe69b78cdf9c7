"""Hosts as the leader reaches them: a process on this machine, which never outlives the leader, or a connection."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts.secured_socket import RELEASE, Refused, connect
from lightning_hetpipe.hosts.wire import Wire
from lightning_hetpipe.server.process.signals import guarded
from lightning_hetpipe.server.transport.security import Security

# The search path comes from the parent, as with multiprocessing, so that the child finds what the parent finds.
CHILD = """
import json, sys
told = json.load(sys.stdin)
sys.path[:] = told["path"]
from lightning_hetpipe.hosts.host_child import child
child(told["security"], *map(int, sys.argv[2:]))
"""
"""Program of a host, whose arguments are a name and descriptors, and whose input says what it has to know."""


def started(security: Security | None, *descriptors: int) -> subprocess.Popen[bytes]:
    """Start the process of a host, which inherits ``descriptors``: its socket, and a pipe for reasons.

    It is told the rest on its standard input, as others can read command lines.
    """
    told = {"path": [os.path.abspath(each) for each in sys.path], "security": security and asdict(security)}
    process = subprocess.Popen(
        guarded([sys.executable, "-c", CHILD, "hetpipe-host", *map(str, descriptors)]),
        stdin=subprocess.PIPE,
        pass_fds=descriptors,
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(json.dumps(told).encode())
    return process


class HostProcess:
    """A host in a process of its own, and the wire to it.

    It is in a session of its own, so that Ctrl-C reaches this process alone, which then ends it.
    """

    def __init__(self) -> None:
        own, its = socket.socketpair()
        with its, ExitStack() as undo:
            undo.callback(own.close)
            # Beside the end of the wire, which others may keep open whom this process has forked.
            self._process = started(None, its.fileno())
            undo.pop_all()
        self.wire = Wire(own, shares=True)

    @property
    def name(self) -> str:
        return f"process {self._process.pid}"

    @property
    def node(self) -> str:
        """Name of another node of a plan: none."""
        return ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def told(self) -> str:
        """Say how it has ended, as the end of a sentence."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "does not answer any more"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"

    def kill(self) -> None:
        """End it by force, also where it is stopped."""
        self._process.kill()

    def join(self, seconds: float) -> None:
        """Wait until it has ended, which it does once its end of the wire says so; after ``seconds`` by force."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


ANSWERING = 60.0
"""Seconds in which a host has to answer: its process imports torch meanwhile."""


class HostConnection:
    """A host at ``address``, with the interface of a ``HostProcess``.

    Args:
        address: The address.
        security: Certificates and token.
        node: Name of its node of a plan, for people.

    Raises:
        SettingError: if nobody answers there, or this process is not let in.
    """

    def __init__(self, address: str, security: Security, node: str = "") -> None:
        self._address = address
        self.node = node
        setting = f"stage_hosts: the host at {address}"
        security.check(address)
        try:
            _, connection = connect(address, security, RELEASE, ANSWERING)
        except Refused as refused:
            raise SettingError(f"{setting} does not let this process in: {refused}") from None
        except TimeoutError:
            raise SettingError(
                f"{setting} does not answer within {ANSWERING:.0f} s; is that hetpipe-host, and do both have"
                " certificates, or neither?"
            ) from None
        except OSError as error:
            raise SettingError(
                f"{setting}: nobody answers there ({error.strerror or error}); start hetpipe-host on that machine, with"
                " address=0.0.0.0 and this port, or correct the address"
            ) from None
        self._connection = connection
        self.wire = Wire(connection)

    @property
    def name(self) -> str:
        return f"host {self._address}"

    def told(self) -> str:
        """Say how it has ended, as the end of a sentence."""
        there = f", or {self.node} cannot be reached any more; see the output there" if self.node else ""
        return f"has closed the connection{there or ', or its machine cannot be reached any more'}"

    def join(self, seconds: float) -> None:
        """Its process ends by itself."""

    def kill(self) -> None:
        """End the connection, and with it the process."""
        with suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)
