"""What outsiders see while ``training_step`` runs ahead of Lightning's loop: step p (law L9)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

import lightning as L

from lightning_hetpipe.pipeline.stretch import ProcessState
from lightning_hetpipe.strategy.attributes import Attributes
from lightning_hetpipe.strategy.outside import Outside
from lightning_hetpipe.strategy.replay import Record, Replay
from lightning_hetpipe.strategy.stretch import TrainerStretch


class Outsiders:
    """Keeps what minibatches in flight log, count and set away from Lightning's loop, until their step.

    Args:
        trainer: Lightning's.
        outside: What no stage has versions of.
        in_flight: Nm, more than 1.
        run_seed: Seeds the random numbers of ``training_step``.
        version: At which the pipeline starts empty.

    Raises:
        SettingError: for what ``training_step`` has changed outside since it was taken.
    """

    def __init__(self, trainer: L.Trainer, outside: Outside, in_flight: int, run_seed: int, version: int) -> None:
        outside.check_step()
        self._trainer = trainer
        self._outside = outside
        self._run_seed = run_seed
        self._replay = Replay(trainer.lightning_module)
        self._replay.install()
        self._records: dict[int, Record] = {}
        self._stretches: dict[int, TrainerStretch] = {}
        self._attributes = Attributes(trainer.lightning_module, in_flight)
        self._attributes.begin(version)

    def close(self) -> None:
        self._replay.uninstall()

    # What runs ahead.

    def transfer(self, minibatch: int) -> AbstractContextManager[None]:
        """Around the hooks of the minibatch's transfer."""
        return self._attributes.stretch(minibatch, 0)

    def stretch(self, minibatch: int) -> TrainerStretch:
        """What ``training_step`` of ``minibatch`` has for itself."""
        state = ProcessState.seeded(self._run_seed, 0, minibatch)
        self._stretches[minibatch] = TrainerStretch(state, self._trainer, self._attributes, minibatch)
        return self._stretches[minibatch]

    @contextmanager
    def recording(self, minibatch: int) -> Iterator[None]:
        """Around all of ``training_step``, in its thread."""
        with self._replay.recording() as record:
            self._records[minibatch] = record
            yield

    # Lightning's thread.

    def assign(self, minibatch: int) -> None:
        """The loop is at ``minibatch``: what that has set on the LightningModule and the Trainer is there."""
        self._attributes.show(minibatch)
        if (stretch := self._stretches.pop(minibatch, None)) is not None and stretch.should_stop:
            self._trainer.should_stop = True

    def replay(self, minibatch: int) -> None:
        """Logs and counts what ``minibatch`` has."""
        if (record := self._records.pop(minibatch, None)) is not None:
            self._replay.replay(record)

    def begin(self, version: int, versioned: Collection[int]) -> None:
        """The pipeline starts empty at ``version``; ``versioned`` are the tensors that have versions."""
        self._outside.begin(versioned)
        self._attributes.begin(version)

    def publish(self, version: int) -> None:
        """Step ``version`` is over, with all its callbacks.

        Raises:
            SettingError: for what they changed and later minibatches have read already.
        """
        self._outside.check(version)
        self._attributes.publish(version)

    def discard(self) -> None:
        """Forgets what was in flight."""
        self._stretches.clear()
        while self._records:
            self._replay.discard(self._records.popitem()[1])
