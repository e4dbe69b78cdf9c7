"""Bandwidth and latency of a link between a client and a server, measured by transfers of meaningless bytes.

A server's memory for them is one buffer of :data:`LARGEST` bytes. All clients share it, because nobody reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from lightning_hetpipe.planning.model.cluster import Link
from lightning_hetpipe.server.transport.interface import LINK, CallRefused, Channel, IncomingCall, Reply

LARGEST = 64 << 20
"""Bytes of the largest transfer. At 100 GB/s it takes about half a millisecond."""

ENOUGH = 0.25
"""Seconds of a transfer that is long enough. So slow links are not measured with large transfers."""

_FIRST = 1 << 18
_SHORT, _LONG = 20, 5
"""Number of transfers of one byte, whose median counts, and of transfers of each of two sizes, whose fastest counts."""


def timed_link(
    transfer: Callable[[int], object], largest: int = LARGEST, now: Callable[[], float] = time.perf_counter
) -> Link:
    """Measure a link by ``transfer``, which sends up to ``largest`` bytes and returns after their arrival.

    The bandwidth comes from the difference between transfers of two sizes. So fixed costs of a transfer do not count,
    such as a round trip or the bytes that a traffic shaper lets through at once.
    """

    def seconds(nbytes: int) -> float:
        began = now()
        transfer(nbytes)
        return now() - began

    seconds(1)  # connects
    latency = median(seconds(1) for _ in range(_SHORT))
    nbytes = min(_FIRST, largest)
    while seconds(nbytes) < ENOUGH and 2 * nbytes <= largest:
        nbytes *= 2
    half = nbytes // 2
    pairs = [(seconds(half), seconds(nbytes)) for _ in range(_LONG)]  # in turns, so that disturbances hit both
    short, long = map(min, zip(*pairs, strict=True))
    # A difference below the clock's steps and disturbances means nothing. Then the whole time counts.
    return Link((nbytes - half) / (long - short) if long > short else nbytes / long, latency)


def slower(one: Link, other: Link) -> Link:
    """Join two directions, or two pairs, into one link that promises no more than either."""
    return Link(min(one.bandwidth, other.bandwidth), max(one.latency, other.latency))


class LinkProbe:
    """Server side: takes a body of up to :data:`LARGEST` bytes, and answers with a body of the requested size."""

    def __init__(self) -> None:
        self._buffer: memoryview | None = None

    def serve(self, call: IncomingCall) -> Reply:
        """Answer a call whose header is the number of bytes to send back."""
        call.receive(self._room(call.size))
        if not call.header.isdigit():
            raise CallRefused(f"malformed: {call.header[:40]!r} is no number of bytes")
        return Reply(b"", [self._room(int(call.header[:20]))])

    def _room(self, size: int) -> memoryview:
        if size > LARGEST:
            raise CallRefused(f"malformed: {size} bytes are more than a measurement takes, {LARGEST}")
        if self._buffer is None:
            self._buffer = memoryview(np.zeros(LARGEST, np.uint8))  # type: ignore[arg-type]  # arrays are buffers
        return self._buffer[:size]


def link_to(channel: Channel, largest: int = LARGEST) -> Link:
    """Measure the link to the server of ``channel`` by transfers of up to ``largest`` bytes, and raise the channel's
    errors.

    The result has the bandwidth of the slower direction, and half a round trip as latency.
    """
    buffer = memoryview(bytearray(largest))
    push = timed_link(lambda nbytes: channel.call(LINK, b"0", [buffer[:nbytes]]), largest)
    pull = timed_link(lambda nbytes: channel.call(LINK, str(nbytes).encode(), (), [buffer[:nbytes]]), largest)
    link = slower(push, pull)
    return Link(link.bandwidth, link.latency / 2)
