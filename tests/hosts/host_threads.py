"""Hosts in threads: they save the imports of a process, and are given nothing but bytes, too."""

from __future__ import annotations

import os
import socket
import threading
from typing import ClassVar

from lightning_hetpipe.hosts.stage_host import Host
from lightning_hetpipe.hosts.wire import Wire
from lightning_hetpipe.server.transport.security import Security


class HostThread:
    """Stands in for a ``HostConnection``."""

    made: ClassVar[list[HostThread]] = []

    def __init__(self) -> None:
        own, its = socket.socketpair()
        self.wire, self._its = Wire(own), Wire(its)
        self.name, self.node = f"process {os.getpid()}", ""
        self.thread = threading.Thread(target=self._run, name="hetpipe-host")
        self.thread.start()
        self.made.append(self)

    def _run(self) -> None:
        Host(self._its, Security(), "127.0.0.1").run()
        self._its.close()

    def told(self) -> str:
        return "has ended"
