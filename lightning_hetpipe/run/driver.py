"""The driver of a run: turns Lightning's calls into the life of a minibatch, and raises its events.

Lightning begins and ends its loop (:meth:`Driver.epoch`), asks for a batch (:meth:`Driver.next_batch`, and what the
look-ahead asks next), and runs a step (:meth:`Driver.finish`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

from lightning_hetpipe.lightning_private import DataFetcher
from lightning_hetpipe.pipeline.user.batch_in_flight import BatchInFlight, current
from lightning_hetpipe.pipeline.user.runner_pool import RunnerPool
from lightning_hetpipe.pipeline.user.user_section import UserSection
from lightning_hetpipe.run.lifecycle import Around, Extension, Extensions
from lightning_hetpipe.run.look_ahead import LookAhead

F = TypeVar("F", bound=BatchInFlight)


class Driver(Generic[F]):
    """A run of one of Lightning's loops. Numbers are those of minibatches over the whole run.

    Attributes:
        extensions: Told of each event.
        restarts: Whether the pipeline starts empty at the next version, for whatever reason.
        copies_batches: Whether the loader was seen to put a batch into the memory of an earlier one.
        pool: Runs the user's steps ahead of the loop. Before :meth:`start` it is an idle one, without stages, and the
            user's steps run in Lightning's own thread.
    """

    def __init__(self) -> None:
        self.extensions = Extensions()
        self.restarts = False
        self.copies_batches = False
        self.pool: RunnerPool[F] = RunnerPool("hetpipe")
        self._over = -1  # the last step of which `stepped` was told

    # What each loop knows.

    def begun(self) -> int:
        """The minibatch that the loop is at, or was at last."""
        raise NotImplementedError

    def runs_ahead(self) -> bool:
        """Tell whether several minibatches may be in flight in this epoch."""
        raise NotImplementedError

    def ahead_limit(self) -> int:
        """Number of batches, from the one that Lightning asks for, that may be in flight now."""
        raise NotImplementedError

    def prepare(self, batch: Any, dataloader_idx: int) -> Any:
        """Move ``batch`` to the devices, with all hooks."""
        raise NotImplementedError

    def submit(self, number: int, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        """Put minibatch ``number``, the next one, in flight."""
        raise NotImplementedError

    # The life of a minibatch.

    def start(self, pool: RunnerPool[F]) -> None:
        """Have the user's steps run in ``pool`` from the next minibatch on."""
        self.pool, self.restarts = pool, False
        pool.start()

    def epoch(self, run: Callable[[DataFetcher], Any], fetcher: DataFetcher, looks_ahead: bool) -> None:
        """One run of Lightning's loop over ``fetcher``: an epoch."""
        self.restarts = True
        self._over = -1  # a search for a learning rate has the same numbers again
        self.extensions.tell(Extension.epoch_begins, self.begun() + 1)
        if looks_ahead:
            ahead = LookAhead(fetcher, self)
            try:
                run(ahead)
            finally:
                ahead.close()
        else:
            run(fetcher)
        self.extensions.tell(Extension.epoch_ends)
        self.pool.discard()
        self.extensions.tell(Extension.discarded)

    def next_batch(self) -> None:
        """Lightning asks for a batch: the step before it is over."""
        if self.runs_ahead():
            self.publish(self.begun())
        elif self.pool.stages:  # hooks may change weights until the step publishes them
            self._step_over(self.begun())

    def around_user(self, number: int) -> tuple[Callable[[], Around], UserSection]:
        """Return what to open around the user's step for minibatch ``number``, and around each section of it."""
        return partial(self.extensions.around, Extension.user_step, number), self.extensions.section(number)

    def finish(self, number: int, args: Sequence[Any]) -> F:
        """Lightning's loop is at step ``number``, which is in flight, with ``args``; waits for it."""
        try:
            with self.doing("wait_for_minibatch", number):
                flight = self.pool.finish(number)
        finally:  # what it has set before it failed is there, as in a plain run
            self.extensions.tell(Extension.arrived, number)
        self.pool.show(flight)
        self.extensions.tell(Extension.finished, flight, args)
        return flight

    def publish(self, version: int) -> None:
        """Make the live weights ``version``, which minibatches find from now on."""
        tell = self.extensions.tell
        self._step_over(version)
        tell(Extension.settled, version)
        if self.restarts:
            with self.doing("publish", version):
                self.pool.begin(version)
            self.restarts = False
            tell(Extension.emptied, version)
            return
        tell(Extension.continues, version)
        with self.doing("publish", version):
            self.pool.publish(version)
        tell(Extension.published, version)

    def close(self) -> None:
        """Ends all threads, and the run."""
        with ExitStack() as stack:
            stack.callback(self.extensions.close)
            stack.callback(self.extensions.tell, Extension.discarded)
            self.pool.close()

    def _step_over(self, version: int) -> None:
        """Raise ``stepped``, once for each step."""
        if version != self._over:
            self._over = version
            self.extensions.tell(Extension.stepped, version)

    # What Lightning's thread does beside its steps.

    def doing(self, name: str, number: int) -> Around:
        """Open around section ``name`` of Lightning's thread, for minibatch ``number`` or after its step."""
        return self.extensions.around(Extension.doing, name, number)

    @contextmanager
    def synchronising(self) -> Iterator[None]:
        """Open around a synchronisation with other virtual workers, in which user code may run."""
        with self.doing("synchronise", self.begun()), self.unlocked():
            yield

    def unlocked(self) -> AbstractContextManager[None]:
        """Give the lock over user code away during a wait of Lightning's thread; in a runner's thread do nothing."""
        return nullcontext() if current() is not None else self.pool.unlocked()

    def computing(self) -> AbstractContextManager[None]:
        """Give the lock over user code away while Lightning's thread computes without user code, as in a copy."""
        return self.pool.computing()

    def offer(self) -> None:
        """Let sections of user code that stages wait for run; called between Lightning's hooks."""
        self.pool.offer()
