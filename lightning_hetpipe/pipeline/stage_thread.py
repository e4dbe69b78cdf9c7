"""Parcels that a thread of a stage takes, and the context managers around the computations of the thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from lightning_hetpipe.pipeline.stage_messages import Message, Result
from lightning_hetpipe.pipeline.streams import StreamEvent
from lightning_hetpipe.pipeline.threads import ReadersWriterLock

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.stage import BeforePass, Stage


class Parcel(NamedTuple):
    """A message whose value is computed behind ``event`` in streams, and its sums behind ``others``."""

    message: Message
    event: StreamEvent | None = None
    others: tuple[StreamEvent, ...] = ()


Done = Callable[[Result, StreamEvent | None], None]
"""Takes a result, and the event behind which it is computed."""


class Pass:
    """Context manager around one computation of a stage. A generator would cost as much as a small layer. It waits
    while a thread holds exclusive access, adds the time to the busy counter, and sleeps to emulate slowness."""

    def __init__(
        self, stage: Stage, compute_lock: ReadersWriterLock, before: BeforePass | None, work: str, minibatch: int
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
    """Loss of a minibatch: user code between the forward and the backward of the last stage, timed as part of it. It
    begins here, in the minibatch's thread."""

    def __init__(self, stage: Stage, before: BeforePass | None, minibatch: int) -> None:
        self._stage = stage
        self._after = None if before is None else before(stage.index, "loss", minibatch)
        self._since = stage.stream.now()

    def end(self, event: StreamEvent | None) -> None:
        """End the loss: ``event`` is behind all work that user code has given to its device."""
        if self._after is not None:
            if event is not None:
                event.synchronize()
            self._after()
        self._stage.stream.spent(self._since)
