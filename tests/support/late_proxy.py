"""A proxy in this process that hands bytes on late, at random: jitter where the kernel has no netem."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from types import TracebackType
from typing import Self

CHUNK = 1 << 14


class LateProxy:
    """Between its clients and ``target``, while its context is entered.

    Args:
        target: Address of the server, as host:port.
        latest: Seconds by which a chunk is late at most.
        seed: Of the seconds.
    """

    def __init__(self, target: str, latest: float, seed: int) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._latest = latest
        self._random = random.Random(seed)
        self._ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.chunks = 0
        """Those that it has handed on."""
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, name="test-proxy")]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for each in self._sockets:
            with contextlib.suppress(OSError):  # it has ended by itself
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                continue
            self._sockets += [client, server]
            for ends in ((client, server), (server, client)):
                thread = threading.Thread(target=self._hand_on, args=ends, name="test-proxy")
                self._threads.append(thread)
                thread.start()

    def _hand_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(CHUNK):
                self._ended.wait(self._random.random() * self._latest)
                sink.sendall(chunk)
                self.chunks += 1
            sink.shutdown(socket.SHUT_WR)
