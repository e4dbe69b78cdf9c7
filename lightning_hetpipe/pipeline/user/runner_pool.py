"""The pool of runners: threads of minibatches in flight, their way through stages, and the waits of Lightning's thread.

Lightning's thread holds the lock over user code except while it waits here.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from lightning_hetpipe.pipeline.stage_messages import Cancel
from lightning_hetpipe.pipeline.stage_thread import Parcel
from lightning_hetpipe.pipeline.streams import WaitingStream
from lightning_hetpipe.pipeline.threads import ReadersWriterLock, Watchdog, Worker
from lightning_hetpipe.pipeline.user.lock import Precedence, Ticket, UserLock

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.stage import Stage, StageSettings
    from lightning_hetpipe.pipeline.user.minibatch import Minibatch

JOIN_SECONDS = 5.0
"""Seconds that closing waits for a thread before it reports the thread as stuck."""


class RunnerPool:
    """A pool that runs up to ``in_flight`` minibatches, each in a runner's thread. A wait in which nothing moves for
    ``timeout`` seconds ends with an explanation."""

    stages: Sequence[Stage]
    """Stages, whose threads start and end with the runners. User code computes on the last one's device."""

    def __init__(self, settings: StageSettings, timeout: float) -> None:
        self.in_flight, self.evaluates = settings.in_flight, settings.evaluates
        self.lock = UserLock()
        self.watchdog = Watchdog(timeout, lambda: self.lock.held, self.describe)
        self.compute_lock = ReadersWriterLock(self.watchdog)
        self.minibatches: dict[int, Minibatch] = {}
        self._torch_threads = settings.torch_threads
        self._runners: list[Worker[Minibatch]] = []
        self._lost_lock = True  # before the start, and where a thread is stuck with the lock over user code
        self._unlocked = False  # Lightning's thread is within `unlocked`

    def start(self) -> None:
        """Start the threads. The calling thread takes the lock over user code."""
        for stage in self.stages:
            stage.start()
        enter = WaitingStream(self.stages[-1].device, [stage.device for stage in self.stages]).enter
        name = "hetpipe-evaluation" if self.evaluates else "hetpipe-runner"
        self._runners = [Worker(f"{name}-{index}", _run, self._torch_threads, enter) for index in range(self.in_flight)]
        self._take_lock()

    def launch(self, minibatch: Minibatch) -> None:
        """Put ``minibatch``, the next one, in flight."""
        self.minibatches[minibatch.number] = minibatch
        self.lock.request(minibatch.start)
        self._runners[minibatch.number % self.in_flight].put(minibatch)

    def finish(self, number: int) -> Minibatch:
        """Wait for minibatch ``number``, and take it out of the pipeline. Its error, if any, is raised with the
        traceback of the thread in which it happened."""
        minibatch = self.minibatches[number]
        self._wait_for(minibatch)
        del self.minibatches[number]
        if minibatch.failure is not None:
            raise minibatch.failure
        return minibatch

    def drain(self) -> None:
        """Wait until nothing is in motion. Minibatches that ended wait for their :meth:`finish`."""
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
        workers: list[Worker[Minibatch] | Stage] = [*self._runners, *self.stages]
        if not workers:
            return
        deadline = time.monotonic() + JOIN_SECONDS
        try:
            self._cancel()
            if self.watchdog.given_up is None:
                for minibatch in self.minibatches.values():
                    self._wait_for(minibatch, deadline)
        finally:
            try:
                with ExitStack() as ends:  # all end, even if one fails
                    for worker in reversed(workers):
                        ends.callback(worker.close)
            finally:
                self._join(workers, deadline)

    def _join(self, workers: Sequence[Worker[Minibatch] | Stage], deadline: float) -> None:
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
        unfinished = [minibatch for minibatch in self.minibatches.values() if not minibatch.ended]
        doing = "the evaluation of batch" if self.evaluates else "training_step of minibatch"
        running = [f"{doing} {minibatch.number} is running" for minibatch in unfinished if minibatch.in_user_code]
        numbers = ", ".join(str(minibatch.number) for minibatch in unfinished) or "none"
        return "; ".join([*(s.describe() for s in self.stages), *running, f"minibatches in flight: {numbers}"])

    def _let_go(self) -> None:
        """Release memory after the last thread, because Python collects its cycles only later."""

    # Waiting.

    def _wait_for(self, minibatch: Minibatch, deadline: float | None = None) -> None:
        if minibatch.ended or self._lost_lock:
            self.offer()
            return
        ticket = Ticket(Precedence.MAIN, minibatch.number)
        ask = partial(minibatch.when_ended, lambda: self.lock.request(ticket))
        self._await(ticket, ask, f"Lightning's step for minibatch {minibatch.number}", release=True, deadline=deadline)

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
        for minibatch in self.minibatches.values():
            minibatch.cancelled = True
            self.abandon(minibatch)

    # Stages.

    def abandon(self, minibatch: Minibatch) -> None:
        """Make stages forget ``minibatch``, for which no thread waits any more."""
        for stage in self.stages:
            stage.put(Parcel(Cancel(minibatch.number)))


def _run(minibatch: Minibatch) -> None:
    minibatch.context.run(minibatch.run)
