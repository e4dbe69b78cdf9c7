"""A stage's thread: takes one message after the other out of its inbox, and hands on the result of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from lightning_hetpipe.errors import Discarded
from lightning_hetpipe.pipeline.memory import explain
from lightning_hetpipe.pipeline.stage_messages import Cancel, Failure, Forward, Message, Result
from lightning_hetpipe.pipeline.streams import Stream, StreamEvent
from lightning_hetpipe.pipeline.threads import ReadersWriterLock, Watchdog, Worker

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.stage import BeforePass


class Parcel(NamedTuple):
    """A message whose value is computed behind ``event`` in streams, and its sums behind ``others``."""

    message: Message
    event: StreamEvent | None = None
    others: tuple[StreamEvent, ...] = ()


Done = Callable[[Result, StreamEvent | None], None]
"""Takes a result, and the event behind which it is computed."""


class StageThread:
    """Stage ``index``: a thread that computes in ``stream`` on ``device``, and calls ``done`` with each result."""

    def __init__(
        self,
        name: str,
        index: int,
        device: torch.device,
        stream: Stream,
        torch_threads: int,
        watchdog: Watchdog,
        done: Done,
    ) -> None:
        self.index = index
        self.device = device
        self.stream = stream
        self.place = str(device)
        """Name of its device for messages."""
        self._name = name
        self._torch_threads = torch_threads
        self._watchdog = watchdog
        self._done = done
        self._worker: Worker[Parcel] | None = None
        self._cancelled: set[int] = set()
        self._doing: tuple[Message, float] | None = None

    # Whoever sends.

    def start(self) -> None:
        self._worker = Worker(self._name, self._run, self._torch_threads, self.stream.enter)

    def put(self, parcel: Parcel) -> None:
        assert self._worker is not None
        if isinstance(parcel.message, Cancel):
            self._cancelled.add(parcel.message.minibatch)
        self._worker.put(parcel)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def join(self, seconds: float) -> bool:
        return self._worker is None or self._worker.join(seconds)

    def describe(self) -> str:
        """Describe what the stage does right now, for error messages."""
        doing = self._doing
        if doing is None:
            return f"stage {self.index} is idle"
        message, since = doing
        return f"stage {self.index} {self._told(message)} for {time.monotonic() - since:.1f} s"

    # Its thread.

    def _run(self, parcel: Parcel) -> None:
        again: Parcel | None = parcel
        while again is not None:
            again = self._answer(again)

    def _answer(self, parcel: Parcel) -> Parcel | None:
        """Handle ``parcel``, and hand the result on. Return a parcel to handle before all others, or None."""
        message = parcel.message
        number = message.minibatch
        if isinstance(message, Cancel):
            self._cancelled.discard(number)
            self._forget(number)
            return None
        self._doing = message, time.monotonic()
        event: StreamEvent | None
        try:
            if number in self._cancelled:
                raise Discarded
            result, event = self._compute(parcel)
        except BaseException as error:
            if isinstance(error, torch.OutOfMemoryError):
                explain(error, self._lacking(message))
            self._forget(number)
            result, event = Failure(number, error), None
        self._doing = None
        self._watchdog.moved()
        self._done(result, event)
        return self._next_of(number) if isinstance(message, Forward) and message.last else None

    def _next_of(self, minibatch: int) -> Parcel | None:
        """Wait for the next message of ``minibatch``, whose loss is being computed, while other messages wait."""

    def _compute(self, parcel: Parcel) -> tuple[Result, StreamEvent | None]:
        """Return the result of ``parcel``, and the event behind which it is computed."""
        raise NotImplementedError

    def _forget(self, minibatch: int) -> None:
        """Drop everything of ``minibatch``."""

    def _lacking(self, message: Message) -> str:
        """Describe what the stage holds when there is no memory for ``message``, and what helps."""
        raise NotImplementedError

    def _told(self, message: Message) -> str:
        """Describe what the stage does with ``message``, for error messages."""
        raise NotImplementedError


class Pass:
    """Context manager around one computation of a stage. A generator would cost as much as a small layer. It waits
    while a thread holds exclusive access, adds the time to the busy counter, and sleeps to emulate slowness."""

    def __init__(
        self, stage: StageThread, compute_lock: ReadersWriterLock, before: BeforePass | None, work: str, minibatch: int
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

    def __init__(self, stage: StageThread, before: BeforePass | None, minibatch: int) -> None:
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
