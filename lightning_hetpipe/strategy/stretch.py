"""A stretch of ``training_step`` that runs ahead of Lightning's loop."""

from __future__ import annotations

from typing import Any

import lightning as L

from lightning_hetpipe.pipeline.stretch import ProcessState, Stretch

_ABSENT = object()
_LIGHTNINGS_OWN = frozenset(vars(L.LightningModule()))


class TrainerStretch(Stretch):
    """Also keeps apart what ``training_step`` sets on the trainer and on the LightningModule.

    ``trainer.should_stop`` of minibatch p takes effect at step p (law L9). An attribute that minibatch p has set on the
    LightningModule (``self.x, self.y = batch``) is its own in its later stretches, whatever other minibatches set in
    between; those that come after it start from what it left, in the order of p.
    """

    def __init__(self, state: ProcessState, trainer: L.Trainer) -> None:
        super().__init__(state)
        self.should_stop = False
        self._trainer = trainer
        self._trainers = False
        self._module: L.LightningModule = trainer.lightning_module
        self._own: dict[str, Any] = {}
        self._theirs: dict[str, Any] = {}
        self._at_start: dict[str, Any] = {}

    def enter(self) -> None:
        super().enter()
        self._trainers, self._trainer.should_stop = self._trainer.should_stop, self.should_stop
        attributes = vars(self._module)
        self._theirs = {name: attributes.get(name, _ABSENT) for name in self._own}
        attributes.update(self._own)
        self._at_start = _users(attributes)

    def leave(self) -> None:
        attributes = vars(self._module)
        for name, value in _users(attributes).items():
            if self._at_start.get(name, _ABSENT) is not value:
                self._own[name] = value
                self._theirs.pop(name, None)
        for name, value in self._theirs.items():  # what this stretch has not set stays as the others left it
            if value is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = value
        self.should_stop, self._trainer.should_stop = self._trainer.should_stop, self._trainers
        super().leave()


def _users(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in _LIGHTNINGS_OWN}
