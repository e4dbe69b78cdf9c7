"""Local rendezvous: on one machine, the first process gives its variables to processes that torchrun or a person
started.

It answers with one packet on an abstract UNIX socket, named after the launch. The socket ends with the process, so a
later launch finds no remains. The kernel tells the user at the other end: other users get nothing, and are not
believed. A connection stays open until one of its ends has ended, so each process notices the end of the first process
at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from lightning_hetpipe.errors import SettingError, notice_if_long
from lightning_hetpipe.hosts.secured_socket import Door
from lightning_hetpipe.server.process.signals import close_in_forks

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_LONGEST = 1 << 16  # bytes of an answer
_MOST = 1024  # connections at a time
_AGAIN = 0.1  # seconds between attempts


class LocalRendezvous:
    """Server that answers every process of this user that asks for ``launch``, until it is closed. Each process is
    given the environment variables ``variables``, and the descriptor ``pipe`` if that is not None."""

    def __init__(self, launch: str, variables: Mapping[str, str], pipe: int | None = None) -> None:
        self._content, self._pipe = json.dumps(dict(variables)).encode(), pipe
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        close_in_forks(listener)
        try:
            listener.bind(_name(launch))
        except OSError:
            listener.close()
            raise SettingError(
                f"another launch on this machine has the same MASTER_ADDR and MASTER_PORT ({launch.rstrip('/')}); give"
                " each launch a MASTER_PORT of its own (torchrun: --master-port)"
            ) from None
        listener.listen(64)
        self._door = Door(listener, self._answer, _MOST, "hetpipe-local-rendezvous")
        self._door.open()

    def close(self) -> None:
        self._door.close()

    def _answer(self, asking: socket.socket, _: str) -> None:
        """Answer a process, and wait until it or this rendezvous has ended."""
        close_in_forks(asking)
        with contextlib.suppress(OSError):
            if _user(asking) == os.getuid():
                socket.send_fds(asking, [self._content], [] if self._pipe is None else [self._pipe])
                asking.recv(1)


class FirstProcess(NamedTuple):
    """First process of ``launch`` on this machine, met over ``connection``, with the ``variables`` and the ``pipe``
    that it gave."""

    connection: socket.socket
    launch: str
    variables: dict[str, str]
    pipe: int | None


def ask(launch: str, timeout: float) -> FirstProcess:
    """Meet the first process of ``launch`` on this machine. Raise SettingError if there is none within ``timeout``
    seconds."""
    name, deadline, gone = _name(launch), time.monotonic() + timeout, threading.Event()
    first = "the first one on this machine (LOCAL_RANK=0, with MASTER_ADDR and MASTER_PORT as here:"
    first = f"{first} {launch.rstrip('/')})"
    with notice_if_long(lambda: f"this virtual worker waits for {first}, for up to {timeout:g} s"):
        while True:
            asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            asking.settimeout(max(_AGAIN, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                asking.connect(name)
                if _user(asking) == os.getuid():
                    said, pipes, _, _ = socket.recv_fds(asking, _LONGEST, 1)
                    if said:  # else the first process is about to end
                        return FirstProcess(asking, launch, json.loads(said), pipes[0] if pipes else None)
            asking.close()
            if time.monotonic() > deadline:
                raise SettingError(
                    f"this virtual worker has waited {timeout:g} s for {first} to start a server; start it as well,"
                    " with these in its environment, or set a longer timeout"
                )
            gone.wait(_AGAIN)


def _name(launch: str) -> str:
    if sys.platform != "linux":
        raise SettingError(
            "processes that were started by torchrun or the like find each other's server on Linux only; start"
            " hetpipe-server, and set WSPCallback(servers=[its address]) and HETPIPE_TOKEN"
        )
    return f"\0hetpipe-{os.getuid()}-{hashlib.sha256(launch.encode()).hexdigest()[:32]}"


def _user(connection: socket.socket) -> int:
    """Return the user of the process at the other end."""
    found: int = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return found
