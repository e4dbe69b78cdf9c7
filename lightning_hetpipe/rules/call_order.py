"""The order of minibatches at a segment that each of them visits several times, and that changes its buffers (law L2).

The buffers after minibatch p are those that its last call leaves, and minibatch p + 1 starts from them. So the first
forward of p + 1 waits until p has made its last call, while other tasks of the stage go on.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class CallOrder(Generic[T]):
    """Lets one minibatch at a time run its forwards at one segment, in order of p; ``T`` are the forwards."""

    def __init__(self) -> None:
        self._open: int | None = None
        self._waiting: deque[tuple[int, T]] = deque()

    def admits(self, minibatch: int, forward: T) -> bool:
        """Tell whether ``forward`` may run now; one that may not is kept until :meth:`close` gives it."""
        if self._open is not None and minibatch > self._open:
            self._waiting.append((minibatch, forward))
            return False
        if self._open is None:  # an earlier one than the open one was cancelled, and nobody wants what it leaves
            self._open = minibatch
        return True

    def close(self, minibatch: int) -> T | None:
        """End the calls of ``minibatch``; give the forward that is ready by that, which is admitted."""
        if minibatch != self._open:
            return None
        self._open, following = self._waiting.popleft() if self._waiting else (None, None)
        return following

    def withdraw(self, minibatch: int) -> bool:
        """Drop a forward of ``minibatch`` that waits; return False if none does."""
        kept = [waiting for waiting in self._waiting if waiting[0] != minibatch]
        found = len(kept) < len(self._waiting)
        self._waiting = deque(kept)
        return found
