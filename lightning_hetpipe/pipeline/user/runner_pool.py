"""The pool of runners: threads of batches in flight, their way through stages, and the waits of Lightning's thread.

Lightning's thread holds the lock over user code except while it waits here.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lightning_hetpipe.errors import Discarded
from lightning_hetpipe.pipeline.stage_messages import Cancel, Failure, InputGradients, Result
from lightning_hetpipe.pipeline.stage_thread import Parcel, StageThread
from lightning_hetpipe.pipeline.streams import StreamEvent, WaitingStream
from lightning_hetpipe.pipeline.threads import ReadersWriterLock, Watchdog, Worker
from lightning_hetpipe.pipeline.user.batch_in_flight import BatchInFlight
from lightning_hetpipe.pipeline.user.lock import Precedence, Ticket, UserLock
from lightning_hetpipe.rules.schedule import Segment, segments

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.stage import Layer, StageSettings

F = TypeVar("F", bound=BatchInFlight)

JOIN_SECONDS = 5.0
"""Seconds that closing waits for a thread before it reports the thread as stuck."""


class RunnerPool(Generic[F]):
    """A pool that runs up to ``in_flight`` batches, each in a runner's thread, and sends them through stages.

    Without ``settings`` it is idle: it has no stages, and is never started. ``following`` and ``preceding`` have the
    next and the previous segment in its piece for each segment, or None.

    Args:
        pieces: Name and layers of each piece, in the order of first calls.
        split_points: The first layer of each stage.
        timeout: Seconds after which a wait in which nothing moves ends with an explanation.
    """

    doing = "training_step of minibatch"
    """Name of a runner's user code in messages."""

    stages: Sequence[StageThread] = ()
    """Stages, whose threads start and end with the runners. User code computes on the last one's device."""

    def __init__(
        self,
        name: str,
        pieces: Sequence[tuple[str, Sequence[Layer]]] = (),
        split_points: Sequence[int] = (),
        settings: StageSettings | None = None,
        timeout: float = 0.0,
    ) -> None:
        self.in_flight = 1 if settings is None else settings.in_flight
        self.piece_names = [name for name, _ in pieces]
        self._layers = [layer for _, own in pieces for layer in own]
        self._segments = segments([len(own) for _, own in pieces], split_points) if pieces else ()
        self._of_piece = [[part for part in self._segments if part.piece == piece] for piece in range(len(pieces))]
        self.following: list[Segment | None] = [part for own in self._of_piece for part in (*own[1:], None)]
        self.preceding: list[Segment | None] = [part for own in self._of_piece for part in (None, *own[:-1])]
        self.lock = UserLock()
        self.watchdog = Watchdog(timeout, lambda: self.lock.held, self.describe)
        self.compute_lock = ReadersWriterLock(self.watchdog)
        self.minibatches: dict[int, F] = {}
        self._name = name
        self._torch_threads = 1 if settings is None else settings.torch_threads
        self._runners: list[Worker[F]] = []
        self._lost_lock = True  # before the start, and where a thread is stuck with the lock over user code
        self._unlocked = False  # Lightning's thread is within `unlocked`

    def start(self) -> None:
        """Start the threads. The calling thread takes the lock over user code."""
        for stage in self.stages:
            stage.start()
        enter = WaitingStream(self.stages[-1].device, [stage.device for stage in self.stages]).enter
        self._runners = [
            Worker(f"{self._name}-{index}", _run, self._torch_threads, enter) for index in range(self.in_flight)
        ]
        self._take_lock()

    def launch(self, batch: F) -> None:
        """Put ``batch``, the next one, in flight."""
        self.minibatches[batch.number] = batch
        self.lock.request(batch.start)
        self._runners[batch.number % self.in_flight].put(batch)

    def finish(self, number: int) -> F:
        """Wait for minibatch ``number``, and take it out of the pipeline. Its error, if any, is raised with the
        traceback of the thread in which it happened."""
        batch = self.minibatches[number]
        self._wait_for(batch)
        del self.minibatches[number]
        if batch.failure is not None:
            raise batch.failure
        return batch

    def begin(self, version: int) -> None:
        """Start with an empty pipeline at ``version``, the live weights."""

    def publish(self, version: int) -> None:
        """Make ``version`` of the live weights."""

    def show(self, batch: F) -> None:
        """Copy the buffers that the forward of ``batch`` left into the live buffers."""

    def drain(self) -> None:
        """Wait until nothing is in motion. Batches that ended wait for their :meth:`finish`."""
        for number in sorted(self.minibatches):
            self._wait_for(self.minibatches[number])

    def discard(self) -> None:
        """Drop every minibatch in flight. Their user code unwinds."""
        self._cancel()
        self.drain()
        self.minibatches.clear()

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        """Context manager in which user code runs while Lightning's thread waits, as for DataLoader workers."""
        if self._lost_lock or self._unlocked:
            yield
            return
        self._unlocked = True
        self.lock.release()
        try:
            yield
        finally:
            self._unlocked = False
            self._take_lock()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context manager in which user code runs while Lightning's thread computes."""
        with self.unlocked(), self.compute_lock.shared():
            yield

    @contextmanager
    def exclusively(self, number: int, who: str) -> Iterator[None]:
        """Context manager in which user code and other threads pause for ``who``, an idle stage. Other threads' waits
        do not time out meanwhile, however long it takes, because it counts as user code."""
        ticket = Ticket(Precedence.RESUME, number)
        self.lock.request(ticket)
        try:
            self.watchdog.wait(ticket.wait, f"{who} for user code to pause")
        except BaseException:
            self.lock.abandon(ticket)
            raise
        try:
            with self.compute_lock.exclusive():
                yield
        finally:
            self.lock.release()

    def offer(self) -> None:
        """Let a thread that waits for the lock over user code go first."""
        if self.lock.wanted() and not self._lost_lock:
            with self.unlocked():
                pass

    def close(self) -> None:
        """Drop what is in flight and end every thread. Warn of a thread that is stuck in a layer or in user code."""
        workers: list[Worker[F] | StageThread] = [*self._runners, *self.stages]
        if not workers:
            return
        deadline = time.monotonic() + JOIN_SECONDS
        try:
            self._cancel()
            if self.watchdog.given_up is None:
                for batch in self.minibatches.values():
                    self._wait_for(batch, deadline)
        finally:
            try:
                with ExitStack() as ends:  # all end, even if one fails
                    for worker in reversed(workers):
                        ends.callback(worker.close)
            finally:
                self._join(workers, deadline)

    def _join(self, workers: Sequence[Worker[F] | StageThread], deadline: float) -> None:
        stuck = [w for w in workers if not w.join(max(0.1, deadline - time.monotonic()))]
        if stuck:
            warnings.warn(f"the pipeline could not end all its threads: {self.describe()}", stacklevel=3)
        ran, self._runners = bool(self._runners), []
        if not stuck:  # otherwise a late result of a stage still ends them
            self.minibatches = {}
            if ran:
                self._let_go()

    def describe(self) -> str:
        """Describe each stage and each minibatch in flight, for messages."""
        unfinished = [batch for batch in self.minibatches.values() if not batch.ended]
        running = [f"{self.doing} {batch.number} is running" for batch in unfinished if batch.in_user_code]
        numbers = ", ".join(str(batch.number) for batch in unfinished) or "none"
        return "; ".join([*(s.describe() for s in self.stages), *running, f"minibatches in flight: {numbers}"])

    def _let_go(self) -> None:
        """Release memory after the last thread, because Python collects its cycles only later."""

    # Waiting.

    def _wait_for(self, batch: F, deadline: float | None = None) -> None:
        if batch.ended or self._lost_lock:
            self.offer()
            return
        ticket = Ticket(Precedence.MAIN, batch.number)
        ask = partial(batch.when_ended, lambda: self.lock.request(ticket))
        self._await(ticket, ask, f"Lightning's step for minibatch {batch.number}", release=True, deadline=deadline)

    def _take_lock(self) -> None:
        ticket = Ticket(Precedence.MAIN, 0)
        ask = partial(self.lock.request, ticket)
        self._await(ticket, ask, "Lightning's thread for user code to pause", release=False)

    def _await(
        self, ticket: Ticket, ask: Callable[[], None], who: str, release: bool, deadline: float | None = None
    ) -> None:
        """Wait in Lightning's thread until ``ticket`` holds the lock over user code, or until ``deadline``, if given.
        If interrupted, cancel what is in flight and give user code some seconds to pause, because Lightning's next work
        is user code too. If the lock does not come back, Lightning's thread goes on without it."""
        self._lost_lock = True
        try:
            if release:
                self.lock.release()
            ask()
            if deadline is None:
                self.watchdog.wait(ticket.wait, who)
                self._lost_lock = False
            else:
                self._lost_lock = not ticket.wait(max(0.0, deadline - time.monotonic()))
        except BaseException:
            self._cancel()
            # An interrupt that comes just as the ticket is granted leaves nothing to wait for.
            granted = ticket.granted or ticket.wait(JOIN_SECONDS)
            self._lost_lock = self.watchdog.given_up is not None or not granted
            raise
        finally:
            if self._lost_lock:
                self.lock.abandon(ticket)

    def _cancel(self) -> None:
        for batch in self.minibatches.values():
            batch.cancelled = True
            self.abandon(batch)

    # Stages.

    def abandon(self, batch: F) -> None:
        """Make stages forget ``batch``, for which no thread waits any more."""
        for stage in self.stages:
            stage.put(Parcel(Cancel(batch.number)))

    def _forward(self, batch: F, segment: Segment, value: Any, event: StreamEvent | None) -> None:
        """Send ``value`` of ``batch``, which is computed behind ``event``, into ``segment``."""
        raise NotImplementedError

    def _backward_done(self, batch: F, result: InputGradients, event: StreamEvent | None) -> None:
        """Send on the gradients from a segment."""
        raise NotImplementedError

    def _done(self, result: Result, event: StreamEvent | None) -> None:
        """Send a batch to its next stage, or at the end of a piece to its runner. Called in stages' threads."""
        batch = self.minibatches.get(result.minibatch)
        if batch is None:  # it has failed, and nobody waits for it
            return
        if isinstance(result, Failure):
            batch.deliver(result.error)
        elif batch.cancelled:
            batch.deliver(Discarded())
        elif isinstance(result, InputGradients):
            self._backward_done(batch, result, event)
        elif (following := self.following[result.segment]) is None:
            batch.deliver(result.value, event)
        else:
            self._forward(batch, following, result.value, event)


class _IdlePool(RunnerPool[Any]):
    def __reduce__(self) -> str:  # copies of a run share it, as nothing changes it
        return "NO_STAGES"


NO_STAGES: RunnerPool[Any] = _IdlePool("hetpipe-idle")
"""Pool of a run without stages."""


def _run(batch: BatchInFlight) -> None:
    batch.context.run(batch.run)
