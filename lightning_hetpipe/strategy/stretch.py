"""A stretch of ``training_step`` that runs ahead of Lightning's loop."""

from __future__ import annotations

import lightning as L

from lightning_hetpipe.pipeline.stretch import ProcessState, Stretch


class TrainerStretch(Stretch):
    """Also keeps apart ``trainer.should_stop``, so that a request of minibatch p's takes effect at step p (law L9)."""

    def __init__(self, state: ProcessState, trainer: L.Trainer) -> None:
        super().__init__(state)
        self.should_stop = False
        self._trainer = trainer
        self._trainers = False

    def enter(self) -> None:
        super().enter()
        self._trainers, self._trainer.should_stop = self._trainer.should_stop, self.should_stop

    def leave(self) -> None:
        self.should_stop, self._trainer.should_stop = self._trainer.should_stop, self._trainers
        super().leave()
