"""The view of observers while the user's steps run ahead of Lightning's loop: all is as at the loop's step (law L9).

Observers are Lightning's loop, callbacks and loggers. They see what a minibatch in flight logs, counts and sets when
the loop is at its step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L

from lightning_hetpipe.lightning_private import counters, counters_ahead, set_counters
from lightning_hetpipe.pipeline.user.batch_in_flight import BatchInFlight
from lightning_hetpipe.pipeline.user.user_section import ProcessSection, ProcessState, UserSection, UserSections
from lightning_hetpipe.run.extensions.module_attributes import Attributes
from lightning_hetpipe.run.extensions.outside_parameters import OutsideParameters
from lightning_hetpipe.run.extensions.replay import Record, Replay
from lightning_hetpipe.run.lifecycle import Around, Extension


class Observers(Extension):
    """Keeps what minibatches in flight log, count and set on the LightningModule away from observers until their step.

    Args:
        module: The LightningModule.
        in_flight: How many may be in flight, more than 1.
        version: The step at which the pipeline starts empty.
        state: What the user code of a minibatch has of the process when it begins.
        context: Opened around what is logged and counted at a minibatch's step.
    """

    def __init__(
        self,
        module: L.LightningModule,
        in_flight: int,
        version: int,
        state: Callable[[int], ProcessState],
        context: Callable[[], Around],
    ) -> None:
        self._replay = Replay(module)
        self._replay.install()
        self._records: dict[int, Record] = {}
        self._attributes = Attributes(module, in_flight)
        self._attributes.begin(version)
        self._state = state
        self._context = context

    def transferring(self, minibatch: int) -> Around:
        return self._attributes.stretch(minibatch, 0)

    @contextmanager
    def user_step(self, minibatch: int) -> Iterator[None]:
        with self._replay.recording() as record:
            self._records[minibatch] = record
            yield

    def section(self, minibatch: int) -> UserSection:
        return UserSections([ProcessSection(self._state(minibatch)), _AttributesSection(self._attributes, minibatch)])

    def arrived(self, minibatch: int) -> None:
        self._attributes.show(minibatch)

    def finished(self, minibatch: BatchInFlight, args: Sequence[Any]) -> None:
        if (record := self._records.pop(minibatch.number, None)) is not None:
            with self._context():
                self._replay.replay(record)

    def continues(self, version: int) -> None:
        self._attributes.publish(version)

    def emptied(self, version: int) -> None:
        self._attributes.begin(version)

    def discarded(self) -> None:
        while self._records:
            self._replay.discard(self._records.popitem()[1])

    def closed(self) -> None:
        self._replay.uninstall()


class TrainerObservers(Extension):
    """Keeps ``trainer.should_stop`` and the loop's counters apart in the same way.

    ``trainer.should_stop`` of minibatch p takes effect at step p (law L9). ``trainer.global_step`` and the loop's
    counters show user code what they would in a plain run.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._sections: dict[int, _TrainerSection] = {}

    @contextmanager
    def transferring(self, minibatch: int) -> Iterator[None]:
        """The batch's transfer comes before its minibatch counts as begun."""
        loops = counters(self._trainer)
        begun, in_epoch, steps = counters_ahead(self._trainer, minibatch)
        set_counters(self._trainer, (begun - 1, in_epoch - 1, steps))
        try:
            yield
        finally:
            set_counters(self._trainer, loops)

    def section(self, minibatch: int) -> UserSection:
        self._sections[minibatch] = section = _TrainerSection(self._trainer, minibatch)
        return section

    def arrived(self, minibatch: int) -> None:
        if (section := self._sections.pop(minibatch, None)) is not None and section.should_stop:
            self._trainer.should_stop = True

    def discarded(self) -> None:
        self._sections.clear()


class UnversionedTensors(Extension):
    """Refuses changes of tensors without versions, which minibatches in flight have read.

    Args:
        outside: These tensors.
        versioned: Gives the ``id`` of all tensors that have versions.

    Raises:
        SettingError: for what ``training_step`` has changed since ``outside`` was made.
    """

    def __init__(self, outside: OutsideParameters, versioned: Callable[[], Collection[int]]) -> None:
        outside.check_step()
        self._outside = outside
        self._versioned = versioned

    def continues(self, version: int) -> None:
        self._outside.check(version)

    def emptied(self, version: int) -> None:
        self._outside.begin(self._versioned())


class _AttributesSection:
    """Has the LightningModule hold the attributes that a minibatch's sections see, one after the other."""

    def __init__(self, attributes: Attributes, minibatch: int) -> None:
        self._attributes = attributes
        self._minibatch = minibatch
        self._entered = 0

    def enter(self) -> None:
        self._entered += 1
        self._attributes.enter(self._minibatch, self._entered)

    def leave(self, for_good: bool = False) -> None:
        self._attributes.leave()


class _TrainerSection:
    """Has the Trainer hold a minibatch's counters and stop request. Made in Lightning's thread, before it starts."""

    def __init__(self, trainer: L.Trainer, minibatch: int) -> None:
        self.should_stop = False
        self._trainer = trainer
        self._loops = False
        self._counters = counters_ahead(trainer, minibatch)
        self._loops_counters = self._counters

    def enter(self) -> None:
        self._loops, self._trainer.should_stop = self._trainer.should_stop, self.should_stop
        self._loops_counters = counters(self._trainer)
        set_counters(self._trainer, self._counters)

    def leave(self, for_good: bool = False) -> None:
        set_counters(self._trainer, self._loops_counters)
        self.should_stop, self._trainer.should_stop = self._trainer.should_stop, self._loops
