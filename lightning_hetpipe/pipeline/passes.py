"""Context managers that are wrapped around the tasks of a stage, from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from lightning_hetpipe.pipeline.streams import Stream, StreamEvent
from lightning_hetpipe.pipeline.threads import ReadersWriterLock

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.stage import BeforePass


class Computes(Protocol):
    """A stage, as far as a :class:`Pass` goes."""

    index: int
    stream: Stream


class Pass:
    """Around what ``stage`` computes at once: never while somebody is alone; counted as busy, padded if that is asked.

    A class, as a generator would cost as much as a small layer.
    """

    def __init__(
        self, stage: Computes, compute_lock: ReadersWriterLock, before: BeforePass | None, work: str, minibatch: int
    ) -> None:
        self._stage = stage
        self._compute_lock = compute_lock
        self._before = before
        self._work = work
        self._minibatch = minibatch
        self._after: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self._compute_lock.begin()
        self._since = self._stage.stream.now()
        if self._before is not None:
            try:
                self._after = self._before(self._stage.index, self._work, self._minibatch)
            except BaseException:
                self._compute_lock.end()
                raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                stream = self._stage.stream
                if self._after is not None:  # who looks at a clock wants to know when it is computed
                    stream.synchronize()
                    self._after()
                stream.spent(self._since)
        finally:
            self._compute_lock.end()


class Loss:
    """Loss of a minibatch: user code between the forward and the backward of the last stage, timed as part of it.

    It begins here, in the minibatch's thread.
    """

    def __init__(self, stage: Computes, before: BeforePass | None, minibatch: int) -> None:
        self._stage = stage
        self._after = None if before is None else before(stage.index, "loss", minibatch)
        self._since = stage.stream.now()

    def end(self, event: StreamEvent | None) -> None:
        """End the loss: all that user code has given to its device stands before ``event``."""
        if self._after is not None:
            if event is not None:
                event.synchronize()
            self._after()
        self._stage.stream.spent(self._since)
