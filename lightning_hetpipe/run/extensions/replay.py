"""Replay: what a ``training_step`` that runs ahead logs and counts takes effect at its own step (law L9).

With more than one minibatch in flight, ``training_step(p)`` runs up to Nm - 1 minibatches before Lightning's loop
reaches minibatch p. What callbacks, loggers and checkpoints see must nevertheless be step p's. So, in the thread that
runs ahead, ``self.log``, ``self.log_dict`` and the calls of torchmetrics objects are recorded, in order; Lightning's
thread makes them when it is at p, where they do what they do in a plain run.

Covered are metrics, collections, wrappers and trackers that are submodules of the LightningModule, at any depth, and
those in lists, tuples, sets and dicts among the attributes of its submodules; each alone, as a member of a collection,
or inside a wrapper. A metric that only something else holds (a global variable, another object) is called at once:
its values are right, but code that reads it in the middle of an epoch finds it up to Nm - 1 minibatches ahead.
Attributes of a metric (its states, ``update_count``) read in ``training_step`` are those of Lightning's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L

from lightning_hetpipe.pipeline.user.batch_in_flight import BatchInFlight
from lightning_hetpipe.run.extensions.call_recorder import CallRecorder
from lightning_hetpipe.run.extensions.recorded_calls import Record
from lightning_hetpipe.run.lifecycle import Around, Extension


class Replay(Extension):
    """Records what the user's step on ``module`` logs and counts; makes these calls at its own step, in ``context``."""

    def __init__(self, module: L.LightningModule, context: Callable[[], Around]) -> None:
        self._calls = CallRecorder(module)
        self._context = context
        self._records: dict[int, Record] = {}  # of minibatches in flight

    @contextmanager
    def user_step(self, minibatch: int) -> Iterator[None]:
        with self._calls.recording() as record:
            self._records[minibatch] = record
            yield

    def finished(self, minibatch: BatchInFlight, args: Sequence[Any]) -> None:
        with self._context():
            self._calls.replay(self._records.pop(minibatch.number))

    def discarded(self) -> None:
        while self._records:
            self._calls.discard(self._records.popitem()[1])

    def closed(self) -> None:
        self._calls.close()
