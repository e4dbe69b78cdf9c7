"""Named threads with an inbox, objects of one thread, waits that explain themselves, and a readers-writer lock."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

from lightning_hetpipe.errors import PipelineStalled

T = TypeVar("T")


class Worker(Generic[T]):
    """A daemon thread that handles the items of its inbox, first in, first out. It begins with the context variables of
    the thread that makes it, such as torch's settings for its compiler. ``handle`` must not raise: failures travel as
    values. The thread calls ``enter`` first, and runs torch operations on ``torch_threads`` threads."""

    def __init__(
        self, name: str, handle: Callable[[T], None], torch_threads: int, enter: Callable[[], None] = lambda: None
    ) -> None:
        self._inbox: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._aside: deque[T | None] = deque()
        self.name = name
        self._handle = handle
        self._torch_threads = torch_threads
        self._enter = enter
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        self._inbox.put(item)

    def take(self, wanted: Callable[[T], bool], seconds: float) -> T | None:
        """Take the next ``wanted`` item ahead of its turn, or return None if none comes within ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                item = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if item is not None and wanted(item):
                return item
            self._aside.append(item)

    def close(self) -> None:
        """End the thread when its inbox is empty."""
        self._inbox.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread. Return False if it has not ended within ``seconds``."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        torch.set_num_threads(self._torch_threads)
        # Otherwise a backward over several devices has a thread for each, and adds gradients in order of arrival.
        torch.autograd.set_multithreading_enabled(False)
        self._enter()
        while (item := self._aside.popleft() if self._aside else self._inbox.get()) is not None:
            self._handle(item)
            del item  # an idle thread must not keep the last minibatch's activations


class PerThread(Generic[T]):
    """An object that each thread holds for itself, even in the hooks and functions of its backward passes. Autograd has
    threads of its own for accelerators, which would not hold it. While a thread holds an object, its backward passes
    run in it."""

    def __init__(self) -> None:
        self._own = threading.local()

    def get(self) -> T | None:
        held: T | None = getattr(self._own, "held", None)
        return held

    @contextmanager
    def holding(self, thing: T) -> Iterator[None]:
        """Context manager in which this thread holds ``thing`` instead of what it held before."""
        outer = self.get()
        with torch.autograd.set_multithreading_enabled(False):
            self._own.held = thing
            try:
                yield
            finally:
                self._own.held = outer


class Watchdog:
    """Waits that end with an explanation when nothing has moved for ``seconds``. Time in which user code runs does not
    count: a breakpoint in ``training_step`` is not a stall."""

    def __init__(self, seconds: float, busy: Callable[[], bool], explain: Callable[[], str]) -> None:
        self.seconds = seconds
        self._busy = busy
        self._explain = explain
        self._moves = 0
        self.given_up: str | None = None
        """Reason why a wait has ended in vain. From then on, every other wait ends so at its next beat."""

    def moved(self) -> None:
        """Restart the time limit of every wait, because something moved."""
        self._moves += 1

    def wait(self, ready: Callable[[float], bool], who: str) -> None:
        """Return once ``ready(seconds)``, which waits for up to this time, is true.

        Raises:
            PipelineStalled: after ``seconds`` in which nothing moved. It names who waited, and what everyone else did.
        """
        beat = min(1.0, self.seconds / 4)
        since, moves = time.monotonic(), self._moves
        while not ready(beat):
            if self._moves != moves or self._busy():
                since, moves = time.monotonic(), self._moves
            elif time.monotonic() - since > self.seconds and self.given_up is None:
                self.given_up = (
                    f"{who} has waited for {self.seconds:g} s while nothing moved: {self._explain()}; if that is how"
                    " long your layers take, raise HetPipeStrategy(timeout=...)"
                )
            if self.given_up is not None:
                raise PipelineStalled(self.given_up)


class ReadersWriterLock:
    """Lock that many threads hold shared, to compute, or one exclusively, to export or compile.

    While ``torch.export`` traces a module, operators in *other* threads give other last bits now and then (*measured*
    with torch 2.13: logits of a small GPT differed by 1e-6). So if a model is captured or compiled while minibatches
    are in flight, stages and the optimizer pause between two tasks.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._readers = 0
        self._wanted = 0  # threads that wait for the others to pause
        self._writer: int | None = None  # the thread that holds it exclusively

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Context manager in which this thread computes. Wait while another thread holds the lock exclusively."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Take the lock shared, until :meth:`end`."""
        with self._lock:  # nearly always enough, and ten times cheaper than the condition
            if self._writer is None or self._writer == threading.get_ident():
                self._readers += 1
                return
        self._watchdog.wait(self._joins, "a thread that is to compute for one that computes alone")

    def _joins(self, seconds: float) -> bool:
        """Take the lock shared. Return False if another thread has held it exclusively for ``seconds``."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._writer is None, seconds):
                return False
            self._readers += 1
            return True

    def end(self) -> None:
        with self._lock:
            self._readers -= 1
            if self._wanted:
                self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Context manager in which only this thread computes."""

        def begin(seconds: float) -> bool:
            with self._condition:
                self._wanted += 1
                try:
                    if not self._condition.wait_for(lambda: self._writer is None and self._readers == 0, seconds):
                        return False
                finally:
                    self._wanted -= 1
                self._writer = threading.get_ident()
                return True

        self._watchdog.wait(begin, "the capture or compilation of a model for what is being computed")
        try:
            yield
        finally:
            with self._condition:
                self._writer = None
                self._condition.notify_all()
