"""Device that has stages of several virtual workers: it computes one task at a time, in the order in which they came.

A stage has no more than one task there, so that virtual workers take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class SharedDevice:
    """State of the device."""

    __slots__ = ("_busy", "_waiting")

    def __init__(self) -> None:
        self._busy = False
        self._waiting: deque[Callable[[float], None]] = deque()

    def take(self, now: float, start: Callable[[float], None]) -> None:
        """Call ``start`` with the time at which the device is the caller's, at the earliest ``now``."""
        if self._busy:
            self._waiting.append(start)
        else:
            self._busy = True
            start(now)

    def free(self, now: float) -> None:
        """End the task that it computes; the next one starts."""
        if self._waiting:
            self._waiting.popleft()(now)
        else:
            self._busy = False
