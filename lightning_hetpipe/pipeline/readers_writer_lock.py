"""Computing alone.

While ``torch.export`` traces a module, operators in *other* threads give other last bits now and then (*measured* with
torch 2.13: logits of a small GPT differed by 1e-6). So where a model is captured or compiled while minibatches are in
flight, stages and the optimizer pause between two tasks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from lightning_hetpipe.pipeline.threads import Watchdog


class ReadersWriterLock:
    """Any number of threads compute at once, or one is alone."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._computes = _Computes(self)
        self._computing = 0
        self._wanted = 0  # threads that wait for the others to pause
        self._alone: int | None = None  # the thread that is

    def computing(self) -> AbstractContextManager[None]:
        """Within it this thread computes; begins when nobody is alone."""
        return self._computes

    def begin(self) -> None:
        """This thread computes from now on, until its :meth:`end`."""
        with self._lock:  # nearly always; the condition would cost ten times as much
            if self._alone is None or self._alone == threading.get_ident():
                self._computing += 1
                return
        self._watchdog.wait(self._joins, "a thread that is to compute for one that computes alone")

    def _joins(self, seconds: float) -> bool:
        """Whether this thread computes from now on, as nobody has been alone, or not for longer than ``seconds``."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._alone is None, seconds):
                return False
            self._computing += 1
            return True

    def end(self) -> None:
        with self._lock:
            self._computing -= 1
            if self._wanted:
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it no other thread computes; this one may."""

        def begin(seconds: float) -> bool:
            with self._condition:
                self._wanted += 1
                try:
                    if not self._condition.wait_for(lambda: self._alone is None and self._computing == 0, seconds):
                        return False
                finally:
                    self._wanted -= 1
                self._alone = threading.get_ident()
                return True

        self._watchdog.wait(begin, "the capture or compilation of a model for what is being computed")
        try:
            yield
        finally:
            with self._condition:
                self._alone = None
                self._condition.notify_all()


class _Computes:
    """Begins and ends, for any number of threads: as a generator it would cost as much as a small layer."""

    def __init__(self, compute_lock: ReadersWriterLock) -> None:
        self._compute_lock = compute_lock

    def __enter__(self) -> None:
        self._compute_lock.begin()

    def __exit__(self, *exception: object) -> None:
        self._compute_lock.end()
