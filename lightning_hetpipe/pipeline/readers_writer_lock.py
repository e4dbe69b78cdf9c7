"""Readers-writer lock: stages compute concurrently; export and compilation run exclusively.

While ``torch.export`` traces a module, operators in *other* threads give other last bits now and then (*measured* with
torch 2.13: logits of a small GPT differed by 1e-6). So where a model is captured or compiled while minibatches are in
flight, stages and the optimizer pause between two tasks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from lightning_hetpipe.pipeline.threads import Watchdog


class ReadersWriterLock:
    """Lock that any number of threads hold shared, or one exclusively."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._readers = 0
        self._wanted = 0  # threads that wait for the others to pause
        self._writer: int | None = None  # the thread that holds it exclusively

    def shared(self) -> Self:
        """Hold the lock shared: this thread computes; wait while another one holds it exclusively."""
        return self

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """Take the lock shared, until :meth:`end`."""
        with self._lock:  # nearly always; the condition would cost ten times as much
            if self._writer is None or self._writer == threading.get_ident():
                self._readers += 1
                return
        self._watchdog.wait(self._joins, "a thread that is to compute for one that computes alone")

    def _joins(self, seconds: float) -> bool:
        """Take the lock shared; return False if another thread has held it exclusively for ``seconds``."""
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
        """Hold the lock exclusively: no other thread computes; this one may."""

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
