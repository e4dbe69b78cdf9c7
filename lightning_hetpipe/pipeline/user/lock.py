"""The lock over user code (law L8): one section of user Python at a time, in a fixed order of precedence.

A section asks with a :class:`Ticket`. The thread that makes a section possible (a stage that delivers an output) enters
the ticket on the waiting thread's behalf, so that one wake-up means both "your value is there" and "the lock is yours".
"""

from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass, field
from enum import IntEnum


class Precedence(IntEnum):
    """Who goes first: a section that stages wait for, then new minibatches, then Lightning's own thread."""

    RESUME = 0
    START = 1
    MAIN = 2


@dataclass(order=True)
class Ticket:
    """A place in the queue for the lock; ties of ``rank`` are settled by the minibatch's ``number``."""

    rank: Precedence
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
        """Whether the lock was granted within ``seconds``. True only once."""
        return self._gate.acquire(timeout=seconds)


class UserLock:
    """A lock that is handed over to the waiting ticket of the lowest rank and number, never to whoever comes by."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: list[Ticket] = []
        self._held = False

    @property
    def held(self) -> bool:
        """Whether some section of user code runs right now."""
        return self._held

    def request(self, ticket: Ticket) -> None:
        """Enters ``ticket``; it is granted at once where the lock is free."""
        with self._mutex:
            heapq.heappush(self._waiting, ticket)
            if not self._held:
                self._hand_over()

    def release(self) -> None:
        """Hands the lock to the next ticket, or leaves it free."""
        with self._mutex:
            self._hand_over()

    def abandon(self, ticket: Ticket) -> None:
        """Gives up ``ticket``, whether it was not entered yet, waits, or holds the lock."""
        with self._mutex:
            ticket.abandoned = True
            if ticket.granted:
                self._hand_over()

    def _hand_over(self) -> None:
        self._held = False
        while self._waiting and not self._held:
            ticket = heapq.heappop(self._waiting)
            if not ticket.abandoned:
                self._held = True
                ticket.grant()

    def wanted(self) -> bool:
        """Whether anyone waits for the lock."""
        return bool(self._waiting)
