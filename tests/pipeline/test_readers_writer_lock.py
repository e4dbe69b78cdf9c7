"""Many compute at once, or one is alone; a wait for that says who waits."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from lightning_hetpipe.errors import PipelineStalled
from lightning_hetpipe.pipeline.threads import ReadersWriterLock, Watchdog


def new_lock(seconds: float = 20.0) -> ReadersWriterLock:
    return ReadersWriterLock(Watchdog(seconds, lambda: False, lambda: "nothing"))


def test_any_number_compute_at_once() -> None:
    one = new_lock()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(one.shared())


def test_one_is_alone() -> None:
    one, order, begun = new_lock(), list[str](), threading.Event()

    def other() -> None:
        begun.set()
        with one.exclusive():
            order.append("exclusive")

    thread = threading.Thread(target=other)
    with one.shared():
        thread.start()
        assert begun.wait(20)
        order.append("computed")
    thread.join(20)
    with one.shared():
        order.append("computed again")
    assert order == ["computed", "exclusive", "computed again"]


@pytest.mark.parametrize(
    ("first", "then", "who"),
    [
        ("shared", "exclusive", "the capture or compilation of a model"),
        ("exclusive", "shared", "a thread that is to compute"),
    ],
)
def test_a_wait_ends_with_an_explanation(first: str, then: str, who: str) -> None:
    one = new_lock(0.05)
    held, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with getattr(one, first)():
            held.set()
            assert ended.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    stalled = pytest.raises(PipelineStalled, match=f"{who} .* has waited for 0.05 s")
    with stalled, getattr(one, then)():
        pytest.fail("both at once")
    ended.set()
    thread.join(20)


def test_an_error_ends_it() -> None:
    one = new_lock()
    for state in (one.exclusive, one.shared, one.exclusive):
        with pytest.raises(ZeroDivisionError), state():
            raise ZeroDivisionError


def test_who_is_alone_computes() -> None:
    """As a stage does in the pass in which it compiles."""
    one = new_lock(0.05)
    with one.exclusive():
        with one.shared():
            pass
        other = threading.Thread(target=one.shared().__enter__)
        with one.shared():
            other.start()
    other.join(20)
    assert not other.is_alive()
