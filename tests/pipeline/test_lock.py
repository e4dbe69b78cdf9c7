"""The lock over user code: one holder at a time, handed over by rank and number."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lightning_hetpipe.pipeline.user.lock import Precedence, Ticket, UserLock


def granted(ticket: Ticket) -> bool:
    return ticket.wait(0)


def test_a_free_lock_is_granted_at_once() -> None:
    lock, ticket = UserLock(), Ticket(Precedence.MAIN, 0)
    before = lock.held
    lock.request(ticket)
    assert (before, lock.held) == (False, True)
    assert granted(ticket)


def test_a_grant_is_seen_once() -> None:
    lock, ticket = UserLock(), Ticket(Precedence.MAIN, 0)
    lock.request(ticket)
    assert [granted(ticket), granted(ticket)] == [True, False]


def test_it_is_free_when_nobody_waits() -> None:
    lock = UserLock()
    lock.request(Ticket(Precedence.MAIN, 0))
    assert not lock.wanted()
    lock.release()
    assert not lock.held


def test_sections_that_stages_wait_for_go_first_and_earlier_minibatches_before_later_ones() -> None:
    lock = UserLock()
    lock.request(Ticket(Precedence.MAIN, 0))
    asked = [
        (Precedence.MAIN, 1),
        (Precedence.START, 9),
        (Precedence.RESUME, 7),
        (Precedence.START, 8),
        (Precedence.RESUME, 3),
        (Precedence.MAIN, 0),
    ]
    tickets = [Ticket(*place) for place in asked]
    for ticket in tickets:
        lock.request(ticket)
        assert lock.wanted()
    order = []
    while lock.wanted():
        lock.release()
        (now,) = [ticket for ticket in tickets if granted(ticket)]
        order.append((now.precedence, now.number))
    assert order == [
        (Precedence.RESUME, 3),
        (Precedence.RESUME, 7),
        (Precedence.START, 8),
        (Precedence.START, 9),
        (Precedence.MAIN, 0),
        (Precedence.MAIN, 1),
    ]


class LockMachine(RuleBasedStateMachine):
    """Tickets come in any order; the holder leaves at any time. The model is a sorted list."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = UserLock()
        self.holder: Ticket | None = None
        self.waiting: list[Ticket] = []

    @rule(rank=st.sampled_from(Precedence), number=st.integers(0, 9))
    def request(self, rank: Precedence, number: int) -> None:
        ticket = Ticket(rank, number)
        self.lock.request(ticket)
        if self.holder is None:
            self.holder = ticket
            assert granted(ticket)
        else:
            self.waiting.append(ticket)

    @precondition(lambda self: self.holder is not None)
    @rule()
    def release(self) -> None:
        self.lock.release()
        self.holder = None
        if self.waiting:
            now = [ticket for ticket in self.waiting if granted(ticket)]
            assert len(now) == 1
            assert (now[0].precedence, now[0].number) == min(
                (ticket.precedence, ticket.number) for ticket in self.waiting
            )
            self.waiting = [ticket for ticket in self.waiting if ticket is not now[0]]
            self.holder = now[0]

    @invariant()
    def nobody_else_is_granted(self) -> None:
        assert not any(granted(ticket) for ticket in self.waiting)

    @invariant()
    def it_says_how_it_stands(self) -> None:
        assert self.lock.held == (self.holder is not None)
        assert self.lock.wanted() == bool(self.waiting)


TestLockMachine = LockMachine.TestCase
TestLockMachine.settings = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize("threads", [2, 7])
def test_one_holder_at_a_time(threads: int) -> None:
    """Threads that want it again and again: what they do inside never overlaps, and everybody gets through."""
    lock, inside, overlaps, done = UserLock(), [0], [0], [0] * threads
    start = threading.Barrier(threads)

    def user(index: int) -> Callable[[], None]:
        def run() -> None:
            start.wait()
            for turn in range(50):
                ticket = Ticket(Precedence(turn % 3), index)
                lock.request(ticket)
                assert ticket.wait(30)
                inside[0] += 1
                overlaps[0] += inside[0] > 1
                done[index] += 1
                inside[0] -= 1
                lock.release()

        return run

    workers = [threading.Thread(target=user(index)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert overlaps == [0]
    assert done == [50] * threads
    assert not lock.held
