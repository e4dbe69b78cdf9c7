"""Hosts in threads: they save the imports of a process, and are given nothing but bytes, too."""

from __future__ import annotations

import os
import socket
import threading
from typing import ClassVar

from lightning_hetpipe.hosts.stage_host import Host
from lightning_hetpipe.hosts.wire import Wire


class HostThread:
    """Stands in for a ``HostProcess``."""

    made: ClassVar[list[HostThread]] = []

    def __init__(self) -> None:
        own, its = socket.socketpair()
        self.wire, self._its = Wire(own, shares=True), Wire(its, shares=True)
        self.pid = os.getpid()
        self.name, self.node = f"process {self.pid}", ""
        self.thread = threading.Thread(target=self._run, name="hetpipe-host")
        self.thread.start()
        self.made.append(self)

    def _run(self) -> None:
        Host(self._its).run()
        self._its.close()

    def told(self) -> str:
        return "has ended"

    def join(self, seconds: float) -> None:
        self.thread.join(seconds)
        assert not self.thread.is_alive()
