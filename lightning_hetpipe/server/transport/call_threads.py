"""Threads in which a server serves its calls: only as many as its present calls need."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

IDLE = 3.0
"""Seconds without a call after which a thread ends."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class CallThreads(Executor):
    """Executor with at most ``most`` threads. A thread ends after ``idle`` seconds without a call.

    ``ThreadPoolExecutor`` keeps each thread that it has made: after a storm of calls, a server would keep hundreds.
    Here the thread that became idle last takes the next call, so the other threads can end.
    """

    def __init__(self, most: int, name: str, idle: float = IDLE) -> None:
        self._most, self._name, self._idle = most, name, idle
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._free: list[queue.SimpleQueue[_Task | None]] = []
        self._waiting: deque[_Task] = deque()
        self._ended = False

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        """Call ``fn`` in one of the threads. Raise RuntimeError after `shutdown`."""
        future: Future[Result] = Future()
        task = future, partial(fn, *args, **kwargs)
        with self._lock:
            if self._ended:
                raise RuntimeError("the server has stopped")
            if self._free:
                self._free.pop().put(task)
                return future
            self._waiting.append(task)
            if len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name=self._name)
                try:
                    thread.start()
                    self._threads.add(thread)
                except RuntimeError:  # the process may have no more threads, but a thread here takes the task later
                    if not self._threads:
                        self._waiting.pop()
                        raise
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no further calls. Threads end after the running and waiting calls. ``cancel_futures`` cancels the
        waiting calls."""
        with self._lock:
            self._ended = True
            dropped = [*self._waiting] if cancel_futures else []
            if cancel_futures:
                self._waiting.clear()
            for each in self._free:
                each.put(None)
            self._free.clear()
            threads = [*self._threads]
        for future, _ in dropped:
            future.cancel()
        for thread in threads if wait else ():
            thread.join()

    def _work(self) -> None:
        own: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        while (task := self._next(own)) is not None:
            _run(*task)
            task = None  # else the call's objects would be kept while this thread is idle
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _next(self, own: queue.SimpleQueue[_Task | None]) -> _Task | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            if self._ended:
                return None
            self._free.append(own)
        try:
            return own.get(timeout=self._idle)
        except queue.Empty:
            with self._lock:
                if own in self._free:
                    self._free.remove(own)
                    return None
            return own.get()  # a call was handed over at the last moment


_Task = tuple[Future[Any], Callable[[], Any]]


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
