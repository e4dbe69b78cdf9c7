"""The lock over user code (law L8): one section of user Python at a time, in a fixed order of precedence.

A section asks with a :class:`Ticket`. The thread that makes a section possible (a stage that delivers an output) enters
the ticket on the waiting thread's behalf. So one wake-up means both "your value is there" and "the lock is yours".
Lightning's own thread runs user code as well, in hooks, and has the lock between its waits (:class:`MainThread`).
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING

from lightning_hetpipe.pipeline.threads import Watchdog

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.user.minibatch import Minibatch


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

    @contextmanager
    def taken(self, ticket: Ticket, watchdog: Watchdog, who: str) -> Iterator[None]:
        """Context manager in which the calling thread holds the lock. ``who`` names it in the watchdog's error."""
        self.request(ticket)
        try:
            watchdog.wait(ticket.wait, who)
        except BaseException:
            self.abandon(ticket)
            raise
        try:
            yield
        finally:
            self.release()

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


class MainThread:
    """Lightning's own thread, which holds the ``lock`` over user code except while it waits in one of these methods.

    If a wait is interrupted, ``cancel`` cancels every minibatch, and user code has some ``seconds`` to pause.
    """

    def __init__(self, lock: UserLock, watchdog: Watchdog, cancel: Callable[[], None], seconds: float) -> None:
        self._lock, self._watchdog, self._cancel, self._seconds = lock, watchdog, cancel, seconds
        self._lost = True  # before it first takes the lock, and if another thread is stuck with the lock
        self._unlocked = False  # it is within `unlocked`

    def take_lock(self) -> None:
        ticket = Ticket(Precedence.MAIN, 0)
        self._await(ticket, partial(self._lock.request, ticket), "Lightning's thread for user code to pause")

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        """Context manager in which user code runs while Lightning's thread waits, as for DataLoader workers."""
        if self._lost or self._unlocked:
            yield
            return
        self._unlocked = True
        self._lock.release()
        try:
            yield
        finally:
            self._unlocked = False
            self.take_lock()

    def leave(self) -> None:
        """Give up the lock for good: Lightning's thread waits only for other threads from now on."""
        if not self._lost and not self._unlocked:
            self._lock.release()
        self._lost = True

    def offer(self) -> None:
        """Let a thread that waits for the lock over user code go first."""
        if self._lock.wanted() and not self._lost:
            with self.unlocked():
                pass

    def wait_for(self, minibatch: Minibatch, deadline: float | None = None) -> None:
        """Wait for the end of ``minibatch``, or until ``deadline``, if given."""
        if minibatch.ended or self._lost:
            self.offer()
            return
        ticket = Ticket(Precedence.MAIN, minibatch.number)

        def ask() -> None:
            self._lock.release()
            minibatch.when_ended(partial(self._lock.request, ticket))

        self._await(ticket, ask, f"Lightning's step for minibatch {minibatch.number}", deadline)

    def _await(self, ticket: Ticket, ask: Callable[[], None], who: str, deadline: float | None = None) -> None:
        """Wait until ``ticket`` holds the lock. An interrupt gives user code time to pause, because Lightning's next
        work is user code. If the lock does not come back, Lightning's thread goes on without it."""
        self._lost = True
        try:
            ask()
            if deadline is None:
                self._watchdog.wait(ticket.wait, who)
                self._lost = False
            else:
                self._lost = not ticket.wait(max(0.0, deadline - time.monotonic()))
        except BaseException:
            self._cancel()
            # An interrupt that comes just as the ticket is granted leaves nothing to wait for.
            granted = ticket.granted or ticket.wait(self._seconds)
            self._lost = self._watchdog.given_up is not None or not granted
            raise
        finally:
            if self._lost:
                self._lock.abandon(ticket)
