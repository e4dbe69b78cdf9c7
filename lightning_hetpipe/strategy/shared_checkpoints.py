"""Checkpoints of several virtual workers: one file for all, and files that they save for each other."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_hetpipe.errors import SettingError, say
from lightning_hetpipe.launch import supervision
from lightning_hetpipe.lightning_private import is_last_batch
from lightning_hetpipe.run.preemption import how_to_resume, unplanned_path
from lightning_hetpipe.run.together import minibatches_per_step
from lightning_hetpipe.strategy.checkpoints import ReplacingCheckpointIO, explaining, local_folder, write
from lightning_hetpipe.strategy.saved_states import (
    LAST_CHANGES,
    add_states,
    note,
    note_shares,
    take_in_flight,
    take_shares,
    take_state,
)
from lightning_hetpipe.strategy.virtual_workers import VirtualWorkers
from lightning_hetpipe.workers.synchroniser import Synchroniser


class SharedCheckpoints:
    """Checkpoints of all virtual workers.

    Virtual worker 0 writes the Trainer's checkpoints, with the state of all, and a checkpoint for virtual workers that
    come back. If virtual worker 0 is lost, the lowest remaining virtual worker writes a checkpoint in its place.
    """

    def __init__(self, workers: VirtualWorkers) -> None:
        self._workers = workers
        self._saves_for: Literal["all", "first", "returning"] = "all"
        # Of the checkpoint that is loaded:
        self.resumed: int | None = None  # Nm
        self.changes: Sequence[Tensor | None] = []  # by its last step
        self._rounded: list[Tensor] = []

    @property
    def is_writer(self) -> bool:
        return self._workers.rank.index == 0 or self._saves_for == "first"

    def add(self, checkpoint: dict[str, Any], path: str | Path, module: L.LightningModule | None, plugin: str) -> None:
        """Add the training state of all virtual workers. All call it. ``plugin`` is the precision plugin's key."""
        workers, synchroniser = self._workers, self._workers.synchroniser
        if "optimizer_states" not in checkpoint or (group := workers.together("trainer.save_checkpoint")) is None:
            return
        if self._saves_for != "returning":
            with explaining(path):
                folder = local_folder(path) if self.is_writer else None
                add_states(checkpoint, group, plugin, synchroniser.rounded, folder)
        assert module is not None, "a run saves"
        goes_on_in = module.trainer.current_epoch + is_last_batch(module.trainer)
        note_shares(checkpoint, synchroniser.shares, minibatches_per_step(module.trainer, goes_on_in))
        if synchroniser.wave is not None:
            note(checkpoint, "wave", synchroniser.wave)  # by which `launch/supervision.py` counts waves

    def write(self, checkpoint: dict[str, Any], path: str | Path, native: Callable[[], None]) -> None:
        """Write by ``native``, Lightning's way, or for returning virtual workers directly, without a CheckpointIO."""
        if self._saves_for != "returning":
            native()
            if self.is_writer and "optimizer_states" in checkpoint:
                supervision.note_saved(path)
        elif self.is_writer:
            _write_for_returning(checkpoint, path)

    def load(self, path: str | Path, native: Callable[[], dict[str, Any]], resuming: bool) -> dict[str, Any]:
        """Load by ``native``, or the others' checkpoint if this process comes back. Return it with our own state."""
        rank, group = self._workers.rank, self._workers.group
        returning = None if group is None else group.seats.returning
        if returning is not None and Path(path) == returning.checkpoint:
            returning.await_state()
            checkpoint = _loaded_from_others(path, rank.index)
        else:
            checkpoint = native()
        recorded = take_shares(checkpoint, rank.size)
        self._workers.recorded = recorded if resuming else None
        self._rounded = take_state(checkpoint, path, rank.index, rank.size, resuming)
        self.resumed, self.changes = take_in_flight(checkpoint), checkpoint.pop(LAST_CHANGES, [])
        return checkpoint

    def restore(self) -> Sequence[Tensor | None]:
        """Give the synchroniser the loaded rounding errors, and return the loaded changes of the last step."""
        self._workers.synchroniser.rounded, self._rounded = self._rounded, []
        changes, self.changes = self.changes, []
        return changes

    # Checkpoints for each other.

    def save_for(self, whom: Literal["first", "returning"], trainer: L.Trainer, path: str | Path) -> None:
        """Save in place of the lost virtual worker 0, or for returning virtual workers. In this case, all call it."""
        self._saves_for = whom
        try:
            trainer.save_checkpoint(path, weights_only=False)
        finally:
            self._saves_for = "all"

    def rescue(self, exception: BaseException, module: L.LightningModule | None) -> None:
        """Save the run in place of virtual worker 0, if ``exception`` ends it because virtual worker 0 is lost.

        Save the global weights that this process took last, and its own buffers, optimizer state, schedulers and loops.
        """
        group, synchroniser = self._workers.group, self._workers.synchroniser
        if group is None or module is None or not isinstance(synchroniser, Synchroniser):
            return
        if not group.ends_without_first(exception):
            return
        supervision.note_lost()
        trainer = module.trainer
        if trainer.checkpoint_callback is None or not synchroniser.go_back():
            return
        path = unplanned_path(trainer, "rescued")
        try:
            self.save_for("first", trainer, path)
        except Exception as error:
            say(f"virtual worker 0 is lost, and virtual worker {group.index} cannot save {path} in its place: {error}")
        else:
            say(f"virtual worker 0 is lost, and virtual worker {group.index} has saved {path}; {how_to_resume(path)}")


def _write_for_returning(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write ``checkpoint``. If the disk has no room, leave an empty file and a message, because the others train on."""
    try:
        write(checkpoint, path)
    except OSError as error:
        os.truncate(path, 0)
        say(
            f"those that are ready to come back have to wait for another epoch: no file of the state that they need can"
            f" be written in {tempfile.gettempdir()} ({os.strerror(error.errno or 0)}); make room there, or set TMPDIR"
        )


def _loaded_from_others(path: str | Path, vw: int) -> dict[str, Any]:
    """Load the checkpoint from which ``vw`` comes back. Unpickle nothing, because another process has written it."""
    try:
        return ReplacingCheckpointIO().load_checkpoint(path, weights_only=True)
    except pickle.UnpicklingError:
        classes = ", ".join(sorted(get_unsafe_globals_in_checkpoint(path)))
        raise SettingError(
            f"virtual worker {vw} cannot come back, as nothing of the others' state is unpickled,"
            f" and it holds {classes}; let that in, by torch.serialization.add_safe_globals([{classes}]), or"
            " leave it out of hyperparameters and of callbacks' states"
        ) from None
