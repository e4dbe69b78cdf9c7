"""What outsiders see while the user's steps run ahead of Lightning's loop: step p (law L9)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

import lightning as L

from lightning_hetpipe.pipeline.stretch import ProcessState
from lightning_hetpipe.strategy.attributes import Attributes
from lightning_hetpipe.strategy.outside import Outside
from lightning_hetpipe.strategy.private import counters, counters_ahead, set_counters
from lightning_hetpipe.strategy.replay import Record, Replay
from lightning_hetpipe.strategy.stretch import ModuleStretch, TrainerStretch


class Outsiders:
    """Keeps what batches in flight log, count and set away from Lightning's loop, until their step.

    Args:
        module: The LightningModule.
        in_flight: How many may be in flight, more than 1.
        version: The step at which the pipeline starts empty.
    """

    def __init__(self, module: L.LightningModule, in_flight: int, version: int) -> None:
        self._replay = Replay(module)
        self._replay.install()
        self._records: dict[int, Record] = {}
        self._attributes = Attributes(module, in_flight)
        self._attributes.begin(version)

    def close(self) -> None:
        self._replay.uninstall()

    # What runs ahead.

    def transfer(self, batch: int) -> AbstractContextManager[None]:
        """Around the hooks of the batch's transfer."""
        return self._attributes.stretch(batch, 0)

    def module_stretch(self, batch: int, state: ProcessState) -> ModuleStretch:
        """What the user's step for ``batch`` has for itself, beginning with ``state``."""
        return ModuleStretch(state, self._attributes, batch)

    @contextmanager
    def recording(self, batch: int) -> Iterator[None]:
        """Around all of the user's step, in its thread."""
        with self._replay.recording() as record:
            self._records[batch] = record
            yield

    # Lightning's thread.

    def assign(self, batch: int) -> None:
        """The loop is at ``batch``: what that has set on the LightningModule is there."""
        self._attributes.show(batch)

    def replay(self, batch: int) -> None:
        """Logs and counts what ``batch`` has."""
        if (record := self._records.pop(batch, None)) is not None:
            self._replay.replay(record)

    def publish(self, version: int) -> None:
        """Step ``version`` is over, with all its callbacks."""
        self._attributes.publish(version)

    def discard(self) -> None:
        """Forgets what was in flight."""
        while self._records:
            self._replay.discard(self._records.popitem()[1])


class TrainingOutsiders(Outsiders):
    """Of training: also stop requests, counters, and what no stage has versions of.

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
        super().__init__(trainer.lightning_module, in_flight, version)
        self._trainer = trainer
        self._outside = outside
        self._run_seed = run_seed
        self.virtual_worker = 0
        self._stretches: dict[int, TrainerStretch] = {}

    @contextmanager
    def transfer(self, batch: int) -> Iterator[None]:
        """Around the hooks of the batch's transfer, which come before it counts as begun."""
        loops = counters(self._trainer)
        begun, in_epoch, steps = counters_ahead(self._trainer, batch)
        with super().transfer(batch):
            set_counters(self._trainer, (begun - 1, in_epoch - 1, steps))
            try:
                yield
            finally:
                set_counters(self._trainer, loops)

    def stretch(self, minibatch: int) -> TrainerStretch:
        """What ``training_step`` of ``minibatch`` has for itself."""
        state = ProcessState.seeded(self._run_seed, self.virtual_worker, minibatch)
        self._stretches[minibatch] = TrainerStretch(state, self._trainer, self._attributes, minibatch)
        return self._stretches[minibatch]

    def assign(self, batch: int) -> None:
        """The loop is at ``batch``: what that has set on the LightningModule and the Trainer is there."""
        super().assign(batch)
        if (stretch := self._stretches.pop(batch, None)) is not None and stretch.should_stop:
            self._trainer.should_stop = True

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
        super().publish(version)

    def discard(self) -> None:
        self._stretches.clear()
        super().discard()
