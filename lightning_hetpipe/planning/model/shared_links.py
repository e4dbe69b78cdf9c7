"""Links and devices that virtual workers share.

At any moment all transfers on a link get equal parts of the bandwidth, like connections of one network. For each link a
clock counts the bytes that every transfer has been given since the link was last idle. A transfer ends when this clock
has advanced by its bytes. So a start or an end changes the pace of all transfers, and only the next end on each link
must be known.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedLink(Generic[T]):
    """One direction of a link with a finite ``bandwidth`` in bytes/s. ``T`` is a transfer's type."""

    __slots__ = ("_bandwidth", "_ends", "_given", "_order", "_since", "carried", "changes", "name")

    def __init__(self, name: str, bandwidth: float) -> None:
        self.name = name
        self.carried = 0.0
        """Bytes of all transfers so far."""
        self.changes = 0
        """Number of starts and ends. The result of :meth:`due` holds until the next one."""
        self._bandwidth = bandwidth
        self._given = 0.0
        self._since = 0.0
        self._order = itertools.count()
        self._ends: list[tuple[float, int, T]] = []

    def add(self, now: float, nbytes: float, transfer: T) -> None:
        """Start ``transfer`` of ``nbytes`` at the time ``now``."""
        if self._ends:
            self._given += (now - self._since) * self._bandwidth / len(self._ends)
        else:
            self._given = 0.0
        self._since = now
        self.carried += nbytes
        heapq.heappush(self._ends, (self._given + nbytes, next(self._order), transfer))
        self.changes += 1

    def due(self) -> float | None:
        """Return the time at which the next transfer ends if none starts before, or None without transfers."""
        if not self._ends:
            return None
        return self._since + (self._ends[0][0] - self._given) * len(self._ends) / self._bandwidth

    def take(self, now: float) -> list[T]:
        """End the transfers that are over at the time that :meth:`due` returned, at least one, and return them."""
        self._given, self._since = self._ends[0][0], now
        over = []
        while self._ends and self._ends[0][0] <= self._given:
            over.append(heapq.heappop(self._ends)[2])
        self.changes += 1
        return over


class SharedDevice:
    """Device with stages of several virtual workers, which computes their tasks one by one as they come.

    A stage has at most one task there at a time, so virtual workers take turns.
    """

    __slots__ = ("_busy", "_waiting")

    def __init__(self) -> None:
        self._busy = False
        self._waiting: deque[Callable[[float], None]] = deque()

    def take(self, now: float, start: Callable[[float], None]) -> None:
        """Call ``start`` with the time, ``now`` or later, at which the caller gets the device."""
        if self._busy:
            self._waiting.append(start)
        else:
            self._busy = True
            start(now)

    def free(self, now: float) -> None:
        """End the running task and start the next one."""
        if self._waiting:
            self._waiting.popleft()(now)
        else:
            self._busy = False
