"""A stretch of ``training_step`` that runs ahead of Lightning's loop."""

from __future__ import annotations

import lightning as L

from lightning_hetpipe.pipeline.stretch import ProcessState, Stretch
from lightning_hetpipe.strategy.attributes import Attributes


class TrainerStretch(Stretch):
    """Also keeps apart what ``minibatch`` sets on the trainer and on the LightningModule.

    ``trainer.should_stop`` of minibatch p takes effect at step p (law L9).
    """

    def __init__(self, state: ProcessState, trainer: L.Trainer, attributes: Attributes, minibatch: int) -> None:
        super().__init__(state)
        self.should_stop = False
        self._trainer = trainer
        self._trainers = False
        self._attributes = attributes
        self._minibatch = minibatch
        self._entered = 0

    def enter(self) -> None:
        super().enter()
        self._trainers, self._trainer.should_stop = self._trainer.should_stop, self.should_stop
        self._entered += 1
        self._attributes.enter(self._minibatch, self._entered)

    def leave(self) -> None:
        self._attributes.leave()
        self.should_stop, self._trainer.should_stop = self._trainer.should_stop, self._trainers
        super().leave()
