"""The driver of a run: turns Lightning's calls into the life of a minibatch, and raises its events.

Lightning asks for a batch (:meth:`Driver.next_batch` and what the look-ahead asks next), runs a step
(:meth:`Driver.finish`), and begins and ends its loop (:meth:`Driver.epoch`). The driver answers with a pipeline once
one has been started, and until then lets the user's step run in Lightning's own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from lightning_hetpipe.lightning_private import DataFetcher
from lightning_hetpipe.pipeline.user.batch_in_flight import BatchInFlight, current
from lightning_hetpipe.pipeline.user.runner_pool import RunnerPool
from lightning_hetpipe.pipeline.user.user_section import UserSection
from lightning_hetpipe.run.lifecycle import Extension, Extensions
from lightning_hetpipe.run.look_ahead import LookAhead

F = TypeVar("F", bound=BatchInFlight)

Opened = Callable[[], AbstractContextManager[Any]]


class Loop(Protocol):
    """One of Lightning's loops, as the driver needs to know it.

    Numbers are those of minibatches over the whole run.
    """

    def begun(self) -> int:
        """The minibatch that the loop is at, or was at last."""

    def limit(self, in_flight: int) -> int:
        """Number of minibatches that the loop will still ask for, from the next one on, up to ``in_flight``."""

    def runs_ahead(self) -> bool:
        """Tell whether several minibatches of a pipeline may be in flight in this epoch."""

    def prepare(self, batch: Any, dataloader_idx: int) -> Any:
        """Moves ``batch`` to the devices, with all hooks."""

    def submit(self, number: int, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        """Puts minibatch ``number`` in flight."""


class Driver(Generic[F]):
    """Drives ``loop``.

    Attributes:
        extensions: Told of each event.
        restarts: Whether the pipeline starts empty at the next version, for whatever reason.
        copies_batches: Whether the loader was seen to put a batch into the memory of an earlier one.
    """

    def __init__(self, loop: Loop) -> None:
        self.extensions = Extensions()
        self.restarts = False
        self.copies_batches = False
        self._over = -1  # the last step of which `stepped` was told
        self.loop = loop
        self._pipeline: RunnerPool[F] | None = None  # until then the user's steps run in Lightning's own thread

    def start(self, pipeline: RunnerPool[F]) -> None:
        """Start ``pipeline``, in which the user's steps run from the next minibatch on."""
        self._pipeline, self.restarts = pipeline, False
        pipeline.start()

    def close(self) -> None:
        """Ends all threads, and the run."""
        with ExitStack() as stack:
            stack.callback(self.extensions.close)
            stack.callback(self.extensions.tell, Extension.discarded)
            if self._pipeline is not None:
                self._pipeline.close()

    # Lightning's loop.

    def epoch(self, run: Callable[[DataFetcher], Any], fetcher: DataFetcher, looks_ahead: bool) -> None:
        """One run of Lightning's loop over ``fetcher``: an epoch."""
        self.restarts = True
        self._over = -1  # a search for a learning rate has the same numbers again
        self.extensions.tell(Extension.epoch_begins, self.loop.begun() + 1)
        if looks_ahead:
            ahead = LookAhead(fetcher, self)
            try:
                run(ahead)
            finally:
                ahead.close()
        else:
            run(fetcher)
        self.extensions.tell(Extension.epoch_ends)
        self.discard()

    def is_in_flight(self, number: int) -> bool:
        """Tell whether minibatch ``number`` was submitted, and is not finished."""
        return self._pipeline is not None and number in self._pipeline.minibatches

    def in_flight(self) -> list[BatchInFlight]:
        """The minibatches in flight, also those that are done and that Lightning's loop has not come to."""
        return [] if self._pipeline is None else list(self._pipeline.minibatches.values())

    def step_inline(self, number: int, native: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run the user's step for minibatch ``number`` in Lightning's own thread, by its own step ``native``."""
        with self.extensions.around(Extension.inline_step, number):
            output = native(*args)
        self.extensions.tell(Extension.inline_output, number, args, output)
        return output

    def backward_inline(self, number: int, native: Callable[[], None]) -> None:
        """Run Lightning's own backward, ``native``, after :meth:`step_inline`."""
        with self.extensions.around(Extension.inline_backward, number):
            native()

    def finish(self, number: int, args: Sequence[Any]) -> F:
        """Lightning's loop is at step ``number``, which is in flight, with ``args``; waits for it."""
        assert self._pipeline is not None
        try:
            with self.extensions.around(Extension.waiting, number):
                flight = self._pipeline.finish(number)
        finally:  # what it has set before it failed is there, as in a plain run
            self.extensions.tell(Extension.arrived, number)
        self._pipeline.show(flight)
        self.extensions.tell(Extension.finished, flight, args)
        return flight

    def computed(self, work: str, minibatch: int, start: float) -> None:
        """Lightning's own thread has done ``work`` of ``minibatch`` since ``start``."""
        self.extensions.tell(Extension.computed, work, minibatch, start)

    def publish(self, version: int) -> None:
        """Make the live weights ``version``, which minibatches find from now on."""
        assert self._pipeline is not None
        tell, around = self.extensions.tell, self.extensions.around
        self._step_over(version)
        tell(Extension.settled, version)
        if self.restarts:
            with around(Extension.publishing, version):
                self._pipeline.begin(version)
            self.restarts = False
            tell(Extension.emptied, version)
            return
        tell(Extension.continues, version)
        with around(Extension.publishing, version):
            self._pipeline.publish(version)
        tell(Extension.published, version)

    def discard(self) -> None:
        """Drops what is in flight."""
        if self._pipeline is not None:
            self._pipeline.discard()
        self.extensions.tell(Extension.discarded)

    @contextmanager
    def evaluating(self, drains: bool = True) -> Iterator[None]:
        """Around an evaluation: what is in flight waits; without ``drains`` nothing ever is."""
        number = self.loop.begun()
        if drains:
            with self.extensions.around(Extension.draining, number):
                self.drain()
        with self.extensions.around(Extension.evaluating, number):
            yield

    @contextmanager
    def synchronising(self) -> Iterator[None]:
        """Raise ``synchronising`` around a synchronisation with other virtual workers, in which user code may run."""
        with self.extensions.around(Extension.synchronising, self.loop.begun()), self.unlocked():
            yield

    def offer(self) -> None:
        """Let sections of user code that stages wait for run; called between Lightning's hooks."""
        if self._pipeline is not None:
            self._pipeline.offer()

    def unlocked(self) -> AbstractContextManager[None]:
        """Give the lock over user code away during a wait of Lightning's thread; in a runner's thread do nothing."""
        return nullcontext() if self._pipeline is None or current() is not None else self._pipeline.unlocked()

    def computing(self) -> AbstractContextManager[None]:
        """Give the lock over user code away while Lightning's thread computes without user code, as in a copy."""
        return nullcontext() if self._pipeline is None else self._pipeline.computing()

    def drain(self) -> None:
        """Waits until nothing in flight moves."""
        if self._pipeline is not None:
            self._pipeline.drain()

    def _step_over(self, version: int) -> None:
        """Raise ``stepped``, once for each step."""
        if version != self._over:
            self._over = version
            self.extensions.tell(Extension.stepped, version)

    # What the look-ahead asks.

    def runs_ahead(self) -> bool:
        """Tell whether several batches may be in flight in this epoch."""
        return self._pipeline is not None and self._pipeline.in_flight > 1 and self.loop.runs_ahead()

    def next_batch(self) -> None:
        """Lightning asks for a batch: the step before it is over."""
        if self.runs_ahead():
            self.publish(self.loop.begun())
        elif self._pipeline is not None:  # hooks may change weights until the step publishes them
            self._step_over(self.loop.begun())

    def ahead_limit(self) -> int:
        """Number of batches, from the one that Lightning asks for, that may be in flight now."""
        assert self._pipeline is not None
        return max(1, self.loop.limit(self._pipeline.in_flight))

    # What the loop asks.

    def launch(self, number: int, start: Callable[[Opened, UserSection], int]) -> None:
        """Puts minibatch ``number`` in flight.

        Args:
            number: The next one.
            start: Does so; gets what is to be open around the user's step, and around each section of it, and gives
                the version that the minibatch uses.
        """
        self.extensions.tell(Extension.submitting, number)
        version = start(partial(self.extensions.around, Extension.user_step, number), self.extensions.section(number))
        self.extensions.tell(Extension.submitted, number, version)
