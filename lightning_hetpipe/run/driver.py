"""The driver of a run: turns Lightning's calls into the life of a minibatch, and raises its events.

Lightning asks for a batch (:meth:`Driver.publish_last` and what the look-ahead asks next), runs a step
(:meth:`Driver.step`), and begins and ends its loop (:meth:`Driver.epoch`). The driver answers with a pipeline once one
is there, and until then lets the user's step run in Lightning's own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

from lightning_hetpipe.lightning_private import DataFetcher, with_workers
from lightning_hetpipe.pipeline.user.batch_in_flight import BatchInFlight, current
from lightning_hetpipe.pipeline.user.runner_pool import RunnerPool
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.run.lifecycle import Extension, Extensions
from lightning_hetpipe.run.look_ahead import LookAhead

F = TypeVar("F", bound=BatchInFlight)
C = TypeVar("C", bound=RunnerPool[Any])


class Loop(Protocol):
    """One of Lightning's loops, as the driver needs to know it.

    Numbers are those of minibatches over the whole run.
    """

    def begun(self) -> int:
        """The minibatch that the loop is at, or was at last."""

    def limit(self, in_flight: int) -> int:
        """How many of ``in_flight`` minibatches, from the next one on, the loop will still ask for."""

    def prepare(self, batch: Any, dataloader_idx: int) -> Any:
        """Moves ``batch`` to the devices, with all hooks."""

    def submit(self, number: int, batch: Any, ahead: int, batch_idx: int, dataloader_idx: int) -> None:
        """Puts minibatch ``number`` in flight, ``ahead`` minibatches after the next one."""


class Driver(Generic[F, C]):
    """Drives ``loop``, with ``extensions``.

    Attributes:
        crew: The pipeline; None as long as the user's steps run in Lightning's own thread.
        restarts: Whether the pipeline starts empty at the next version, for whatever reason.
    """

    def __init__(self, loop: Loop, extensions: Extensions) -> None:
        self.extensions = extensions
        self.crew: C | None = None
        self.restarts = False
        self._loop = loop

    def extend(self, *extensions: Extension) -> None:
        """Adds ``extensions``, for all events from now on."""
        self.extensions.all.extend(extensions)

    def close(self) -> None:
        """Ends all threads, and the run."""
        with ExitStack() as stack:
            stack.callback(self.extensions.closed)
            stack.callback(self.extensions.discarded)
            if self.crew is not None:
                self.crew.close()

    # Lightning's loop.

    def epoch(self, run: Callable[[DataFetcher], Any], fetcher: DataFetcher, looks_ahead: bool) -> None:
        """One run of Lightning's loop over ``fetcher``: an epoch."""
        self.restarts = self.crew is not None
        self.extensions.epoch_begins(self._loop.begun() + 1)
        if looks_ahead:
            ahead = LookAhead(fetcher, self)
            try:
                run(ahead)
            finally:
                ahead.close()
        else:
            run(fetcher)
        self.extensions.epoch_ends()
        self.discard()

    def step_inline(self, number: int, native: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run the user's step for minibatch ``number`` in Lightning's own thread, by its own step ``native``."""
        with self.extensions.inline_step(number):
            output = native(*args)
        self.extensions.inline_output(number, args, output)
        return output

    def backward_inline(self, number: int, native: Callable[[], None]) -> None:
        """Run Lightning's own backward, ``native``, after :meth:`step_inline`."""
        with self.extensions.inline_backward(number):
            native()

    def finish(self, number: int, args: Sequence[Any]) -> F:
        """Lightning's loop is at step ``number``, which is in flight, with ``args``; waits for it."""
        assert self.crew is not None
        try:
            with self.extensions.waiting(number):
                flight: F = self.crew.finish(number)
        finally:  # what it has set before it failed is there, as in a plain run
            self.extensions.arrived(number)
        self.crew.show(number)
        self.extensions.finished(flight, args)
        return flight

    def publish(self, version: int) -> None:
        """Lightning's step ``version`` is over, with all its callbacks."""
        crew = self.crew
        assert crew is not None
        self.extensions.stepped(version)
        if self.restarts:
            with self.extensions.publishing(version):
                crew.begin(version)
            self.restarts = False
            self.extensions.emptied(version)
            return
        self.extensions.continues(version)
        with self.extensions.publishing(version):
            crew.publish(version)
        self.extensions.published(version)

    def discard(self) -> None:
        """Drops what is in flight."""
        if self.crew is not None:
            self.crew.discard()
        self.extensions.discarded()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around an evaluation: what is in flight waits."""
        number = self._loop.begun()
        with self.extensions.draining(number):
            self.drain()
        with self.extensions.evaluating(number):
            yield

    def offer(self) -> None:
        """Between Lightning's hooks: lets user code that stages wait for go first."""
        if self.crew is not None:
            self.crew.offer()

    def unlocked(self) -> AbstractContextManager[None]:
        """Around a wait of Lightning's thread: user code may run. Not so in a minibatch's own thread."""
        return nullcontext() if self.crew is None or current() is not None else self.crew.unlocked()

    def computing(self) -> AbstractContextManager[None]:
        """Around what Lightning's thread computes."""
        return nullcontext() if self.crew is None else self.crew.compute_lock.computing()

    def drain(self) -> None:
        """Waits until nothing in flight moves."""
        if self.crew is not None:
            self.crew.drain()

    # What the look-ahead asks.

    def publish_last(self) -> None:
        if self.crew is not None and self.crew.in_flight > 1:
            self.publish(self._loop.begun())

    def ahead_limit(self) -> int:
        return 1 if self.crew is None else max(1, self._loop.limit(self.crew.in_flight))

    def fetching(self, ahead: int) -> AbstractContextManager[None]:
        return self.extensions.fetching(self._loop.begun() + 1 + ahead)

    def prepare(self, batch: Any, ahead: int, dataloader_idx: int) -> Any:
        with self.extensions.transferring(self._loop.begun() + 1 + ahead):
            return self._loop.prepare(batch, dataloader_idx)

    def submit(self, batch: Any, ahead: int, batch_idx: int, dataloader_idx: int) -> None:
        if self.crew is not None and self.crew.in_flight > 1:
            self._loop.submit(self._loop.begun() + 1 + ahead, batch, ahead, batch_idx, dataloader_idx)

    def on_iterators(self, fetcher: DataFetcher) -> list[Redirect]:
        return with_workers(fetcher, self.unlocked, self.drain)
