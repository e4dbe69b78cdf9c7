"""Counters and stop request of the Trainer while ``training_step`` runs ahead of Lightning's loop (law L9)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L

from lightning_hetpipe.lightning_private import counters, counters_ahead, set_counters
from lightning_hetpipe.pipeline.user.user_section import UserSection
from lightning_hetpipe.run.lifecycle import Extension


class TrainerCounters(Extension):
    """Shows user code of a minibatch the counters of its own step, and lets its stop request take effect there.

    These are ``trainer.global_step`` and what the loop counts, and ``trainer.should_stop``.
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
