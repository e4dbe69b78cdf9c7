"""Bandwidth and latency of a link, from how long transfers over it take."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from lightning_hetpipe.planning.model.cluster import Link

LARGEST = 64 << 20
"""Bytes of the largest transfer; with it, a transfer of 100 GB/s takes about half a millisecond."""

ENOUGH = 0.25
"""Seconds after which a transfer is long enough, so that slow links are not measured with large ones."""

_FIRST = 1 << 18
_SHORT, _LONG = 20, 5
"""Transfers of a byte, of which the median counts, and of each of two sizes, of which the fastest counts."""


def timed_link(
    transfer: Callable[[int], object], largest: int = LARGEST, now: Callable[[], float] = time.perf_counter
) -> Link:
    """Measure a link.

    The bandwidth is that between transfers of two sizes, so that whatever each transfer takes besides does not count: a
    round trip, or bytes that a traffic shaper lets through at once.

    Args:
        transfer: Sends that many bytes, and returns once they have arrived.
        largest: Bytes that it can send.
        now: The clock, in seconds.
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
    # A difference below the clock's steps and disturbances says nothing; then all of the time counts.
    return Link((nbytes - half) / (long - short) if long > short else nbytes / long, latency)


def slower(one: Link, other: Link) -> Link:
    """Join two directions, or pairs, into one link that promises no more than either."""
    return Link(min(one.bandwidth, other.bandwidth), max(one.latency, other.latency))
