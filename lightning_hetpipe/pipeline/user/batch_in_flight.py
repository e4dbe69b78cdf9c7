"""One batch in flight: the user's step for it, run in a thread of its own ahead of Lightning's loop.

Its life, as its runner's thread goes through it:

    run                  waits for the lock over user code, which other threads have until then
    _run_step            the user's step (a subclass's), in sections of user code
    _through_pipeline    at each call into the pipeline: ends the section and gives the lock back, waits until a stage
                         delivers, and goes on with the lock
    _step_ended          the step is over, or has failed (a subclass's)
    end                  a thread that waits for it goes on
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_hetpipe.errors import Discarded
from lightning_hetpipe.pipeline.streams import StreamEvent
from lightning_hetpipe.pipeline.threads import PerThread
from lightning_hetpipe.pipeline.user.lock import Precedence, Ticket
from lightning_hetpipe.pipeline.user.user_section import NO_SECTION, UserSection

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.user.runner_pool import RunnerPool

UNWINDING = 4.0
"""Seconds for which user code that must unwind waits for the lock, fewer than the pipeline waits for its threads."""


class BatchInFlight:
    """Batch ``number`` in flight. It is in one place at a time: in its runner (user code) or with a stage. If it fails
    or is discarded, it ends there. Of batches that wait for the lock over user code, the lowest number goes first.
    ``section`` swaps process state in and out around its sections of user code."""

    def __init__(self, pipeline: RunnerPool[Any], number: int, section: UserSection = NO_SECTION) -> None:
        self.number = number
        self.output: Any = None
        self.failure: BaseException | None = None
        self.cancelled = False
        self.in_user_code = False
        self.start = Ticket(Precedence.START, number)
        self.context = contextvars.copy_context()
        """Context variables of the submitting thread."""
        self._began_at = time.perf_counter()
        self.ended = False
        self.ended_at = self._began_at
        """Time of its end, by ``time.perf_counter``."""
        self._pipeline = pipeline
        self._section = section
        self._arrived: Any = None
        self.arrived_after: StreamEvent | None = None
        """Event behind which the value that arrived last is computed."""
        self._resume: Ticket | None = None
        self._mutex = threading.Lock()
        self._when_ended: Callable[[], None] | None = None

    # Lightning's side.

    @property
    def seconds(self) -> float:
        """Seconds in flight, once it has ended."""
        return self.ended_at - self._began_at

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call ``call`` once the batch has ended, at once if it has ended already."""
        with self._mutex:
            if not self.ended:
                self._when_ended = call
                return
        call()

    def end(self, failure: BaseException | None = None) -> None:
        """Mark the batch as ended: its results are there, or it failed."""
        with self._mutex:
            if self.ended:
                return
            self.ended = True
            self.ended_at = time.perf_counter()
            self.failure = self.failure or failure
            call = self._when_ended
        self._pipeline.watchdog.moved()
        if call is not None:
            call()

    # The stages' side.

    def deliver(self, value: Any, event: StreamEvent | None = None) -> None:
        """Hand a stage's result, or a failure, to the runner, with a place in the lock's queue. If no runner waits,
        because it has handed over the last task, a failure ends the batch."""
        ticket = self._take_ticket()
        if ticket is None:
            self.end(value if isinstance(value, BaseException) else None)
            return
        self._arrived, self.arrived_after = value, event
        self._pipeline.lock.request(ticket)

    # The runner's side.

    def run(self) -> None:
        """Run the user's step. Called once, in the runner's thread."""
        failure: BaseException | None = None
        try:
            self._pipeline.watchdog.wait(self.start.wait, f"the start of minibatch {self.number}")
        except BaseException as error:
            self._pipeline.lock.abandon(self.start)
            self.end(error)
            return
        try:
            self._enter()
            self._check_cancelled()
            with _current.holding(self):
                self._run_step()
        except BaseException as error:
            failure = error
        try:
            self._leave(for_good=True)
        except BaseException as error:
            failure = failure or error
        self._step_ended(failure)

    def _run_step(self) -> None:
        """Run the user's step, in a section of user code."""
        raise NotImplementedError

    def _step_ended(self, failure: BaseException | None) -> None:
        """React to the end of :meth:`_run_step`."""
        raise NotImplementedError

    def _through_pipeline(self, start: Callable[[], None], what: str) -> Any:
        """Hand over to the pipeline, let other user code run meanwhile, and return what comes back."""
        ticket = self._resume = Ticket(Precedence.RESUME, self.number)
        start()
        failure: BaseException | None = None
        try:
            self._leave()
        except BaseException as error:  # raised below: what was started comes back first
            failure = error
        try:
            self._pipeline.watchdog.wait(ticket.wait, f"minibatch {self.number} for {what}")
        except BaseException:
            if self._take_ticket() is not None:  # nothing came, so nobody has asked for the lock yet
                self._pipeline.lock.request(ticket)
            if ticket.wait(min(UNWINDING, self._pipeline.watchdog.seconds)):
                self._enter()
            else:  # user code unwinds without the lock, because its holder is stuck
                self._pipeline.lock.abandon(ticket)
            raise
        self._enter()
        arrived, self._arrived = failure or self._arrived, None
        if isinstance(arrived, BaseException):
            self.failure = arrived
            raise arrived
        return arrived

    def _take_ticket(self) -> Ticket | None:
        with self._mutex:
            ticket, self._resume = self._resume, None
        return ticket

    def _check_cancelled(self) -> None:
        if self.cancelled:
            raise Discarded

    def _enter(self) -> None:
        self.in_user_code = True
        self._section.enter()

    def _leave(self, for_good: bool = False) -> None:
        if not self.in_user_code:
            return
        try:
            self._section.leave(for_good)
        finally:
            self.in_user_code = False
            self._pipeline.lock.release()


_current: PerThread[BatchInFlight] = PerThread()


def current() -> BatchInFlight | None:
    """Return the batch whose user code runs in this thread, or None."""
    return _current.get()
