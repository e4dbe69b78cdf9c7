"""A stretch of the user's step that runs ahead of Lightning's loop."""

from __future__ import annotations

import lightning as L

from lightning_hetpipe.pipeline.stretch import ProcessState, Stretch
from lightning_hetpipe.strategy.attributes import Attributes
from lightning_hetpipe.strategy.private import counters, counters_ahead, set_counters


class ModuleStretch(Stretch):
    """Also keeps apart what ``batch`` sets on the LightningModule."""

    def __init__(self, state: ProcessState, attributes: Attributes, batch: int) -> None:
        super().__init__(state)
        self._attributes = attributes
        self._batch = batch
        self._entered = 0

    def enter(self) -> None:
        super().enter()
        self._entered += 1
        self._attributes.enter(self._batch, self._entered)

    def leave(self, for_good: bool = False) -> None:
        self._attributes.leave()
        super().leave(for_good)


class TrainerStretch(ModuleStretch):
    """Also keeps apart what ``minibatch`` sets on the trainer.

    ``trainer.should_stop`` of minibatch p takes effect at step p (law L9). ``trainer.global_step`` and the loop's
    counters show it what they would in a plain run. Made in Lightning's thread, before the minibatch starts.
    """

    def __init__(self, state: ProcessState, trainer: L.Trainer, attributes: Attributes, minibatch: int) -> None:
        super().__init__(state, attributes, minibatch)
        self.should_stop = False
        self._trainer = trainer
        self._trainers = False
        self._counters = counters_ahead(trainer, minibatch)
        self._loops_counters = self._counters

    def enter(self) -> None:
        self._trainers, self._trainer.should_stop = self._trainer.should_stop, self.should_stop
        self._loops_counters = counters(self._trainer)
        set_counters(self._trainer, self._counters)
        super().enter()

    def leave(self, for_good: bool = False) -> None:
        super().leave(for_good)
        set_counters(self._trainer, self._loops_counters)
        self.should_stop, self._trainer.should_stop = self._trainer.should_stop, self._trainers
