"""Threads of a server's calls: as many as calls need, and gone when they do not."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from lightning_hetpipe.server.transport.grpc_server import CallThreads
from tests.server.transports import PATIENCE, eventually

NAME = "hetpipe-test-calls"


def alive() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


def test_threads_are_bounded_and_end_when_they_are_idle() -> None:
    threads, go, entered = CallThreads(3, NAME, idle=0.05), threading.Event(), threading.Semaphore(0)

    def call(number: int) -> int:
        entered.release()
        assert go.wait(PATIENCE)
        return number

    calls = [threads.submit(call, number) for number in range(7)]
    assert all(entered.acquire(timeout=PATIENCE) for _ in range(3))
    assert alive() == 3
    go.set()
    assert [each.result(PATIENCE) for each in calls] == [*range(7)]
    eventually(lambda: alive() == 0, "threads stay though nothing is called")
    assert threads.submit(call, 8).result(PATIENCE) == 8
    threads.shutdown()
    assert alive() == 0


def test_errors_and_the_end() -> None:
    threads, go, entered = CallThreads(1, NAME), threading.Event(), threading.Event()

    def held() -> None:
        entered.set()
        assert go.wait(PATIENCE)

    assert isinstance(threads.submit(int, "x").exception(PATIENCE), ValueError)
    running, waiting = threads.submit(held), threads.submit(held)
    assert entered.wait(PATIENCE)
    threads.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE)
    with pytest.raises(RuntimeError, match="the server has stopped"):
        threads.submit(held)
    go.set()
    assert running.result(PATIENCE) is None
    eventually(lambda: alive() == 0, "a thread outlives the end")


def test_calls_wait_where_the_process_may_have_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error came from gRPC's own thread, and the end of the server waited for a thread that had never begun."""
    threads, go = CallThreads(2, NAME), threading.Event()
    first = threads.submit(go.wait, PATIENCE)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", start)
        second = threads.submit(int, "2")
        with pytest.raises(RuntimeError, match="can't start"):
            CallThreads(2, NAME).submit(int, "3")
    go.set()
    assert (first.result(PATIENCE), second.result(PATIENCE)) == (True, 2)
    threads.shutdown()
    assert alive() == 0
