"""The lock over user code (law L8): one section of user Python at a time, in a fixed order of precedence.

A section asks with a :class:`Ticket`. The thread that makes a section possible (a stage that delivers an output) enters
the ticket on the waiting thread's behalf. So one wake-up means both "your value is there" and "the lock is yours".
"""

from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass, field
from enum import IntEnum


class Precedence(IntEnum):
    """Order of the waiting: sections that stages wait for, then new minibatches, then Lightning's own thread."""

    RESUME = 0
    START = 1
    MAIN = 2


@dataclass(order=True)
class Ticket:
    """A place in the queue for the lock. With equal ``precedence``, the lower minibatch ``number`` goes first."""

    precedence: Precedence
    number: int
    granted: bool = field(default=False, compare=False)
    abandoned: bool = field(default=False, compare=False)
    _gate: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._gate.acquire()

    def grant(self) -> None:
        self.granted = True
        self._gate.release()

    def wait(self, seconds: float) -> bool:
        """Wait for up to ``seconds``. Return True, and only once, if the lock was granted."""
        return self._gate.acquire(timeout=seconds)


class UserLock:
    """A lock that is handed to the first of the waiting tickets, never to a thread that happens to come by."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: list[Ticket] = []
        self.held = False
        """True while a section of user code runs."""

    def request(self, ticket: Ticket) -> None:
        """Enter ``ticket``. It is granted at once if the lock is free."""
        with self._mutex:
            heapq.heappush(self._waiting, ticket)
            if not self.held:
                self._hand_over()

    def release(self) -> None:
        """Hand the lock to the next ticket, or leave it free."""
        with self._mutex:
            self._hand_over()

    def abandon(self, ticket: Ticket) -> None:
        """Give up ``ticket``, which may not be entered yet, may wait, or may hold the lock."""
        with self._mutex:
            ticket.abandoned = True
            if ticket.granted:
                self._hand_over()

    def _hand_over(self) -> None:
        self.held = False
        while self._waiting and not self.held:
            ticket = heapq.heappop(self._waiting)
            if not ticket.abandoned:
                self.held = True
                ticket.grant()

    def wanted(self) -> bool:
        """Return True if a ticket waits for the lock."""
        return bool(self._waiting)
