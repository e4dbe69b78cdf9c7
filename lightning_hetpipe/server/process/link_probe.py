"""Transfers without meaning between a client and a server, by which the link between them is measured.

A server's memory for them is one buffer of :data:`LARGEST` bytes, which all clients share, as nobody reads it.
"""

from __future__ import annotations

import numpy as np

from lightning_hetpipe.planning.model.cluster import Link
from lightning_hetpipe.planning.model.link_timing import LARGEST, slower, timed_link
from lightning_hetpipe.server.transport.interface import LINK, CallRefused, Channel, Reply


class LinkProbe:
    """Server side: takes a body of up to :data:`LARGEST` bytes, and answers with one of as many as are asked for."""

    def __init__(self) -> None:
        self._buffer: memoryview | None = None

    def open(self, size: int) -> memoryview:
        """Return room for a body of ``size`` bytes."""
        if size > LARGEST:
            raise CallRefused(f"malformed: {size} bytes are more than a measurement takes, {LARGEST}")
        if self._buffer is None:
            self._buffer = memoryview(np.zeros(LARGEST, np.uint8))  # type: ignore[arg-type]  # arrays are buffers
        return self._buffer[:size]

    def run(self, header: bytes) -> Reply:
        """Answer a call whose header is the number of bytes to send back."""
        if not header.isdigit():
            raise CallRefused(f"malformed: {header[:40]!r} is no number of bytes")
        return Reply(b"", [self.open(int(header[:20]))])


def link_to(channel: Channel, largest: int = LARGEST) -> Link:
    """Measure the link to the server of ``channel``: the slower of both directions; half a round trip is its latency.

    Args:
        channel: Connects at its first call, if it has not yet.
        largest: Bytes of the largest transfer.

    Raises:
        CallRefused, Unreachable: by the channel.
    """
    buffer = memoryview(bytearray(largest))

    def push(nbytes: int) -> None:
        channel.call(LINK, b"0", [buffer[:nbytes]])

    def pull(nbytes: int) -> None:
        channel.call(LINK, str(nbytes).encode(), (), [buffer[:nbytes]])

    link = slower(timed_link(push, largest), timed_link(pull, largest))
    return Link(link.bandwidth, link.latency / 2)
