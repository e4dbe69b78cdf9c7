"""Checkpoints of several virtual workers: one file for all, and those that they save for each other."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_hetpipe.errors import SettingError, say
from lightning_hetpipe.launch import supervision
from lightning_hetpipe.lightning_private import is_fitting, is_last_batch
from lightning_hetpipe.run.preemption import how_to_resume, unplanned_path
from lightning_hetpipe.run.together import minibatches_per_step
from lightning_hetpipe.strategy.checkpoints import ReplacingCheckpointIO, explaining, local_folder, write
from lightning_hetpipe.strategy.saved_states import add_states, note_shares, note_wave, take_shares, take_state
from lightning_hetpipe.strategy.virtual_workers import VirtualWorkers
from lightning_hetpipe.workers.synchroniser import NoSynchroniser, Synchroniser


class SharedCheckpoints(VirtualWorkers):
    """Saves and loads what a run of virtual workers goes on from.

    Virtual worker 0 writes the Trainer's checkpoints, with everyone's state; another for those that come back; and one
    in its place is written, where it is lost, by the lowest that is left.

    Args:
        arguments, settings: ``VirtualWorkers``'s.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._saves_for: Literal["all", "first", "returning"] = "all"
        self._rounded: list[Tensor] = []  # of the checkpoint that is loaded

    @property
    def is_global_zero(self) -> bool:
        return super().is_global_zero or self._saves_for == "first"

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write one file, of virtual worker 0, which each one's state of training is in; called on all."""
        of_training, returning = "optimizer_states" in checkpoint, self._saves_for == "returning"
        if of_training and (group := self._together("trainer.save_checkpoint")) is not None:
            if not returning:
                plugin = type(self.precision_plugin).__qualname__
                with explaining(filepath):
                    folder = local_folder(filepath) if self.is_global_zero else None
                    add_states(checkpoint, group, plugin, self._shared.rounded, folder)
            assert self.lightning_module is not None, "a run saves"
            trainer = self.lightning_module.trainer
            goes_on_in = trainer.current_epoch + is_last_batch(trainer)
            note_shares(checkpoint, self._shared.shares, minibatches_per_step(trainer, goes_on_in))
            note_wave(checkpoint, self._shared.wave)
        if not returning:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            if self.is_global_zero and of_training:
                supervision.note_saved(filepath)
        elif self.is_global_zero:
            _write_for_returning(checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load what this virtual worker would have saved, if it has taken part in saving."""
        returning = None if self._group is None else self._group.seats.returning
        if returning is not None and Path(checkpoint_path) == returning.checkpoint:
            returning.await_state()
            checkpoint = _loaded_from_others(checkpoint_path, self.global_rank)
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        resuming = is_fitting(self.lightning_module)
        recorded = take_shares(checkpoint, self.world_size)
        self._recorded = recorded if resuming else None
        self._rounded = take_state(checkpoint, checkpoint_path, self.global_rank, self.world_size, resuming)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._shared.rounded, self._rounded = self._rounded, []

    # Checkpoints for each other.

    def _synchroniser(self, trainer: L.Trainer) -> Synchroniser | NoSynchroniser:
        synchroniser = super()._synchroniser(trainer)
        if isinstance(synchroniser, Synchroniser):
            synchroniser.save_for_returning = partial(self._save_for, "returning")
        return synchroniser

    def on_exception(self, exception: BaseException) -> None:
        """Save the run in a checkpoint, if ``exception`` ends it as virtual worker 0 is lost, and this one is to save.

        The checkpoint has the weights that this one took last, which all have had, and its own buffers, optimizer
        state, schedulers and loops.
        """
        super().on_exception(exception)
        group, synchroniser = self._group, self._shared
        if group is None or self.lightning_module is None or not isinstance(synchroniser, Synchroniser):
            return
        if not group.ends_without_first(exception):
            return
        supervision.note_lost()
        trainer = self.lightning_module.trainer
        if trainer.checkpoint_callback is None or not synchroniser.go_back():
            return
        path = unplanned_path(trainer, "rescued")
        try:
            self._save_for("first", path)
        except Exception as error:
            say(f"virtual worker 0 is lost, and virtual worker {group.index} cannot save {path} in its place: {error}")
        else:
            say(f"virtual worker 0 is lost, and virtual worker {group.index} has saved {path}; {how_to_resume(path)}")

    def _save_for(self, whom: Literal["first", "returning"], path: str | Path) -> None:
        """Save a checkpoint in the place of virtual worker 0; or that one's state alone for those that come back.

        The latter is called on all; the file goes to those at once: no plugin writes it later, or as something else.
        """
        assert self.lightning_module is not None
        self._saves_for = whom
        try:
            self.lightning_module.trainer.save_checkpoint(path, weights_only=False)
        finally:
            self._saves_for = "all"


def _write_for_returning(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write ``checkpoint``; where there is no room for it, leave nothing, and say so, as all others train on."""
    try:
        write(checkpoint, path)
    except OSError as error:
        os.truncate(path, 0)
        say(
            f"those that are ready to come back have to wait for another epoch: no file of the state that they need can"
            f" be written in {tempfile.gettempdir()} ({os.strerror(error.errno or 0)}); make room there, or set TMPDIR"
        )


def _loaded_from_others(path: str | Path, vw: int) -> dict[str, Any]:
    """The checkpoint from which ``vw`` comes back; as it is another process's, nothing of it is unpickled."""
    try:
        return ReplacingCheckpointIO().load_checkpoint(path, weights_only=True)
    except pickle.UnpicklingError:
        classes = ", ".join(sorted(get_unsafe_globals_in_checkpoint(path)))
        raise SettingError(
            f"virtual worker {vw} cannot come back, as nothing of the others' state is unpickled,"
            f" and it holds {classes}; let that in, by torch.serialization.add_safe_globals([{classes}]), or"
            " leave it out of hyperparameters and of callbacks' states"
        ) from None
