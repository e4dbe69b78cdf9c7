"""Local rendezvous: processes of one machine that torchrun or the like started learn from the first one what it knows.

The first one answers on an abstract UNIX socket, which is named after the launch and ends with the process, so that
nothing is left behind for a later launch to find. The kernel says who is at the other end: other users are told
nothing, and not believed.
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

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.process.notices import say

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_LONGEST = 1 << 16
_AGAIN = 0.1  # seconds between attempts


class LocalRendezvous:
    """Gives ``variables`` to every process of this user that asks for those of ``launch``, until it is closed."""

    def __init__(self, launch: str, variables: Mapping[str, str]) -> None:
        self._content = json.dumps(dict(variables)).encode()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(_name(launch))
        except OSError:
            self._socket.close()
            raise SettingError(
                f"another launch on this machine has the same MASTER_ADDR and MASTER_PORT ({launch.rstrip('/')}); give"
                " each launch a MASTER_PORT of its own (torchrun: --master-port)"
            ) from None
        self._socket.listen(64)
        threading.Thread(target=self._answer, name="hetpipe-local-rendezvous", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing alone does not
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                asking, _ = self._socket.accept()
            except OSError:
                return
            with asking, contextlib.suppress(OSError):
                if _user(asking) == os.getuid():
                    asking.sendall(self._content)


SILENT = 10.0
"""Seconds of waiting of which nothing is said."""


def ask(launch: str, timeout: float) -> dict[str, str]:
    """The variables that the first process of ``launch`` on this machine gives.

    Raises:
        SettingError: if there is none within ``timeout`` seconds.
    """
    name, began, gone = _name(launch), time.monotonic(), threading.Event()
    deadline, told = began + timeout, False
    where = f"LOCAL_RANK=0, with MASTER_ADDR and MASTER_PORT as here: {launch.rstrip('/')}"
    while True:
        with socket.socket(socket.AF_UNIX) as asking, contextlib.suppress(OSError):
            asking.settimeout(max(_AGAIN, deadline - time.monotonic()))
            asking.connect(name)
            if _user(asking) == os.getuid():
                said = b""
                while (part := asking.recv(4096)) and len(said) < _LONGEST:
                    said += part
                if said:  # and not about to end
                    variables: dict[str, str] = json.loads(said)
                    return variables
        if time.monotonic() > deadline:
            raise SettingError(
                f"this virtual worker has waited {timeout:g} s for the first one on this machine ({where}) to start a"
                " server; start it as well, with these in its environment, or set a longer timeout"
            )
        if not told and time.monotonic() > began + SILENT:
            told = True
            say(f"this virtual worker waits for the first one on this machine ({where}), for up to {timeout:g} s")
        gone.wait(_AGAIN)


def _name(launch: str) -> str:
    if sys.platform != "linux":
        raise SettingError(
            "processes that were started by torchrun or the like find each other's server on Linux only; start"
            " hetpipe-server, and set WSPCallback(servers=[its address]) and HETPIPE_TOKEN"
        )
    return f"\0hetpipe-{os.getuid()}-{hashlib.sha256(launch.encode()).hexdigest()[:32]}"


def _user(connection: socket.socket) -> int:
    """The user whose process is at the other end."""
    found: int = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return found
