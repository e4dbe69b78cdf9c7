"""The driver of a run, which turns Lightning's calls into the life of a minibatch and raises its events.

:class:`TrainerRun` is what the strategy asks of the Trainer's current run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_hetpipe.lightning_private import DataFetcher, move_before_transfer
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.user.minibatch import Minibatch, current
from lightning_hetpipe.pipeline.user.user_section import UserSection
from lightning_hetpipe.run.lifecycle import Around, Extension, Extensions
from lightning_hetpipe.run.look_ahead import LookAhead


class TrainerRun:
    """One run of the Trainer: a fit or an evaluation. An instance of this class itself stands for no run.

    Attributes:
        pipeline: Runs minibatches in flight, once there are stages.
        devices: The stages' devices, once there are stages.
    """

    def __init__(self) -> None:
        self.pipeline: Engine | None = None
        self.devices: Sequence[torch.device] = ()

    def open(self) -> None:
        """Begin the run."""

    def close(self) -> None:
        """End the run, and leave no thread and no change in the module behind."""

    def finish_report(self) -> None:
        """Report the numbers so far. Training is over, and loggers are open."""

    def lacking(self) -> str:
        """Describe what devices needed memory for when one ran out of it, and what helps."""
        return (
            "the model was on its way to its devices, which share it by the bytes of its weights; give more devices, or"
            " ones with more memory"
        )

    def trained_in_flight(self, before: int) -> int:
        """Return the Nm with which the weights are trained now, or ``before``, the last fit's Nm, outside of a fit."""
        return before

    def last_changes(self) -> Sequence[Tensor | None]:
        """Return each parameter's change by the optimizer's last step, if weights are predicted by it."""
        return ()

    def restore_changes(self, changes: Sequence[Tensor | None]) -> None:
        """Restore the ``changes`` of a checkpoint, from :meth:`last_changes`, after optimizer states were restored."""

    def training_step(self, native: Callable[..., Any], *args: Any) -> Any:
        """Run Lightning's step ``native``, or wait for its minibatch if there is a pipeline."""
        return native(*args)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Open a context around ``optimizer``'s step."""
        return nullcontext()

    def offer(self) -> None:
        """Run user code for which stages wait, between Lightning's hooks."""
        if self.pipeline is not None:
            self.pipeline.main.offer()

    def evaluation_step(self, hook: str, native: Callable[..., Any], *args: Any) -> Any:
        """Run the strategy's own step ``hook``, ``native``, or take its output from the pipeline."""
        return native(*args)


class Driver(TrainerRun):
    """A run of one of the loops of ``trainer``. It numbers minibatches over the whole run. Until :meth:`start` there is
    no pipeline, and the user's steps run in Lightning's own thread.

    Attributes:
        restarts: Whether the pipeline starts empty at the next version.
        copies_batches: Whether the loader was seen to reuse the memory of an earlier batch.
    """

    def __init__(self, trainer: L.Trainer, precision: Precision) -> None:
        super().__init__()
        self._trainer = trainer
        self._precision = precision
        self.extensions = Extensions()
        self.restarts = False
        self.copies_batches = False
        self._over = -1  # the last step of which `stepped` was told

    # What each loop knows.

    def begun(self) -> int:
        """Return the minibatch at which the loop is, or was last."""
        raise NotImplementedError

    def runs_ahead(self) -> bool:
        """Return True if several minibatches may be in flight in this epoch."""
        raise NotImplementedError

    def ahead_limit(self) -> int:
        """Return the number of batches that may be in flight now, beginning with the batch that Lightning asks for."""
        raise NotImplementedError

    def submit(self, number: int, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        """Put minibatch ``number``, the next one, in flight."""
        raise NotImplementedError

    # The life of a minibatch.

    def start(self, pipeline: Engine) -> None:
        """Run the user's steps in ``pipeline`` from the next minibatch on."""
        self.pipeline, self.restarts = pipeline, False
        pipeline.start()

    def epoch(self, run: Callable[[DataFetcher], Any], fetcher: DataFetcher, looks_ahead: bool) -> None:
        """Run one epoch: Lightning's loop ``run`` over ``fetcher``."""
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
        if self.pipeline is not None:
            self.pipeline.catch_up()  # the epoch's time counts what devices still compute
        self.extensions.tell(Extension.epoch_ends)
        if self.pipeline is not None:
            self.pipeline.discard()
        self.extensions.tell(Extension.discarded)

    def prepare(self, batch: Any, dataloader_idx: int) -> Any:
        """Move ``batch`` to the devices with all transfer hooks, as Lightning would do it."""
        batch = self._precision.convert_input(batch)
        batch = move_before_transfer(self._trainer.lightning_module, batch, dataloader_idx)
        return self._trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)

    def next_batch(self) -> None:
        """Handle Lightning's request for a batch: the step before it is over."""
        if self.runs_ahead():
            self.publish(self.begun())
        elif self.pipeline is not None:  # hooks may change weights until the step publishes them
            self._step_over(self.begun())

    def around_user(self, number: int) -> tuple[Callable[[], Around], UserSection]:
        """Return a context around the user's step for minibatch ``number``, and the sections of user code in it."""
        return partial(self.extensions.around, Extension.user_step, number), self.extensions.section(number)

    def finish(self, number: int, args: Sequence[Any]) -> Minibatch:
        """Wait for minibatch ``number``, at whose step, with ``args``, Lightning's loop has arrived."""
        assert self.pipeline is not None
        try:
            with self.doing("wait_for_minibatch", number):
                minibatch = self.pipeline.finish(number)
        finally:  # even after a failure, its assignments are there, as in a plain run
            self.extensions.tell(Extension.arrived, number)
        self.pipeline.show(minibatch)
        self.extensions.tell(Extension.finished, minibatch, args)
        return minibatch

    def publish(self, version: int) -> None:
        """Publish the live weights as ``version``, for the minibatches from now on."""
        tell, pipeline = self.extensions.tell, self.pipeline
        assert pipeline is not None
        self._step_over(version)
        tell(Extension.settled, version)
        if self.restarts:
            with self.doing("publish", version):
                pipeline.begin(version)
            self.restarts = False
            tell(Extension.emptied, version)
            return
        tell(Extension.continues, version)
        with self.doing("publish", version):
            pipeline.publish(version)
        tell(Extension.published, version)

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.extensions.close)
            stack.callback(self.extensions.tell, Extension.discarded)
            if self.pipeline is not None:
                self.pipeline.close()

    def _step_over(self, version: int) -> None:
        """Raise ``stepped``, but only once for each step."""
        if version != self._over:
            self._over = version
            self.extensions.tell(Extension.stepped, version)

    # What Lightning's thread does beside its steps.

    def doing(self, name: str, number: int) -> Around:
        """Open a context around section ``name`` of Lightning's thread, for minibatch ``number`` or after its step."""
        return self.extensions.around(Extension.doing, name, number)

    @contextmanager
    def synchronising(self) -> Iterator[None]:
        """Open a context around a synchronisation with other virtual workers, during which user code may run."""
        with self.doing("synchronise", self.begun()), self.unlocked():
            yield

    def unlocked(self) -> AbstractContextManager[None]:
        """Release the lock over user code during a wait of Lightning's thread. In a runner's thread do nothing."""
        return nullcontext() if self.pipeline is None or current() is not None else self.pipeline.main.unlocked()

    def computing(self) -> AbstractContextManager[None]:
        """Release the lock over user code while Lightning's thread computes without user code, as in a copy."""
        return nullcontext() if self.pipeline is None else self.pipeline.computing()

    def alone(self) -> AbstractContextManager[None]:
        """Pause all computations of the pipeline, as while a module is captured."""
        return nullcontext() if self.pipeline is None else self.pipeline.compute_lock.exclusive()

    def drain(self) -> None:
        """Wait until nothing in flight is in motion."""
        if self.pipeline is not None:
            self.pipeline.drain()


def default_dtype_in(context: Callable[[], AbstractContextManager[Any]]) -> torch.dtype | None:
    """Return the default dtype within a precision plugin's ``context``, or None if it is the process's default."""
    with context():
        inside = torch.get_default_dtype()
    return None if inside is torch.get_default_dtype() else inside
