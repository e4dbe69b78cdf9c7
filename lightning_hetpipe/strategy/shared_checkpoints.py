"""Checkpoints of several virtual workers: one file for all, and files that they save for each other.

Lightning's own keys hold virtual worker 0's state, so that any strategy resumes from the file and any program loads it.
This package's part is beside them: Nm, N, and the training state of each virtual worker. The state of virtual worker i
is bytes that only virtual worker i reads. If it resumes, its state replaces virtual worker 0's. Weights and buffers are
in the file once.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_hetpipe.errors import SettingError, say
from lightning_hetpipe.launch import supervision
from lightning_hetpipe.lightning_private import is_last_batch
from lightning_hetpipe.rules.waves import whole_steps
from lightning_hetpipe.run.preemption import how_to_resume, unplanned_path
from lightning_hetpipe.run.together import minibatches_per_step
from lightning_hetpipe.strategy.checkpoints import ReplacingCheckpointIO, explaining, local_folder, write
from lightning_hetpipe.strategy.virtual_workers import VirtualWorkers
from lightning_hetpipe.workers.synchroniser import Synchroniser

if TYPE_CHECKING:
    from lightning_hetpipe.workers.group import Group
    from lightning_hetpipe.workers.shared_data import Shares

_NOTE = "hetpipe"

LAST_CHANGES = "hetpipe_last_changes"
"""Key of the last step's changes, by which some weight policies predict weights."""

OWN = ("optimizer_states", "lr_schedulers", "loops", "callbacks", "global_step", LAST_CHANGES)
"""Keys of the state that differs between virtual workers. The precision plugin adds its key."""

_ROUNDED = "rounded"


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
        """Write by ``native``, Lightning's way, or for returning virtual workers directly, without a CheckpointIO. If
        that is impossible, leave them an empty file."""
        if self._saves_for != "returning":
            native()
            if self.is_writer and "optimizer_states" in checkpoint:
                supervision.note_saved(path)
        elif self.is_writer:
            try:
                write(checkpoint, path)
            except OSError as error:  # such as of a full disk; the others train on
                os.truncate(path, 0)
                say(
                    "those that are ready to come back have to wait for another epoch: no file of the state that they"
                    f" need can be written in {tempfile.gettempdir()} ({os.strerror(error.errno or 0)}); make room"
                    " there, or set TMPDIR"
                )

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


# This package's part of a checkpoint.


def note(checkpoint: dict[str, Any], name: str, value: Any) -> None:
    """Write ``value`` into our part of ``checkpoint``. Without notes, it is as any strategy writes it."""
    checkpoint.setdefault(_NOTE, {})[name] = value


def take_in_flight(checkpoint: dict[str, Any]) -> int | None:
    """Return the noted Nm or None, and remove our part of ``checkpoint``, so that users' hooks do not see it."""
    noted: int | None = checkpoint.pop(_NOTE, {}).get("in_flight")
    return noted


def note_shares(checkpoint: dict[str, Any], shares: Shares | None, every: int = 1) -> None:
    """Note each virtual worker's minibatches per wave, if unequal. A wave is whole optimizer steps of ``every``."""
    if shares is not None and shares.decided:
        note(checkpoint, "shares", list(whole_steps(shares.lengths, every)))


def take_shares(checkpoint: dict[str, Any], size: int) -> tuple[int, ...] | None:
    """Return the noted shares, or None without shares for exactly ``size`` virtual workers."""
    noted = checkpoint.get(_NOTE, {}).pop("shares", None)
    return None if noted is None or len(noted) != size else tuple(noted)


def add_states(
    checkpoint: dict[str, Any], group: Group, plugin: str, rounded: Sequence[Tensor], folder: Path | None
) -> None:
    """Add the other virtual workers' states to virtual worker 0's ``checkpoint``. All call it, each with its own state.

    A virtual worker that has ended or waits at a later cut is left out. States arrive one after the other, so that no
    process holds more than one foreign state. Virtual worker 0 keeps them in unnamed files until it has saved.

    Args:
        plugin: Key of the precision plugin.
        rounded: Rounding errors of ``update_dtype``, which the next update includes.
        folder: Folder with room for virtual worker 0's files, by default the system's temporary folder.
    """
    own = {name: checkpoint[name] for name in (*OWN, plugin) if group.index and name in checkpoint}
    if rounded:
        own[_ROUNDED] = list(rounded)

    def opened() -> IO[bytes]:
        return tempfile.TemporaryFile(dir=folder)

    files = group.collect(lambda: _content(own, group.index), "trainer.save_checkpoint", opened)
    if group.index == 0 and own:
        files[0] = opened()
        files[0].write(_content(own, 0))
    states = {index: _mapped(file) for index, file in sorted(files.items()) if file.tell()}
    checkpoint.setdefault(_NOTE, {}).update(virtual_workers=group.size, states=states)


def take_state(
    checkpoint: dict[str, Any], path: str | Path, index: int, size: int, resuming: bool = True
) -> list[Tensor]:
    """Turn ``checkpoint`` into the checkpoint of virtual worker ``index`` of ``size``, and return ``rounded``.

    With a warning, virtual worker 0's state stands in for a missing state, or for all if N has changed. ``rounded`` is
    empty unless training goes on (``resuming``). Raise SettingError if the state cannot be read.
    """
    note = checkpoint.get(_NOTE, {})
    saved, states = note.pop("virtual_workers", 1), note.pop("states", {})
    if not resuming or "optimizer_states" not in checkpoint:
        return []
    if saved != size:
        rank_zero_warn(
            f"the checkpoint was saved by {saved} and is resumed by {size} virtual worker{'s' if size > 1 else ''}:"
            " each goes on from virtual worker 0's optimizer state, schedulers and counters"
        )
        return []
    if missing := [each for each in range(1, size) if each not in states]:
        rank_zero_warn(
            f"the checkpoint holds no state of virtual worker {_listed(missing)}, which had ended or was elsewhere when"
            " it was saved: it goes on from virtual worker 0's optimizer state, schedulers and counters"
        )
    if index not in states:
        return []
    own = _unpacked(states[index], path, index)
    rounded: list[Tensor] = own.pop(_ROUNDED, [])
    if index and (lacking := [name for name in OWN if name in checkpoint and name not in own]):
        warnings.warn(
            f"the checkpoint holds no {_listed(lacking)} of virtual worker {index}, which takes virtual worker 0's",
            stacklevel=2,
        )
    checkpoint.update(own)
    return rounded


def _content(own: dict[str, Any], index: int) -> bytes | memoryview:
    """Return ``own`` as bytes. Leave out, with a warning, what cannot travel."""
    if not own:
        return b""
    whole = _written(own)
    if whole is not None:
        return whole
    kept = {name: value for name, value in own.items() if _written({name: value}) is not None}
    warnings.warn(
        f"{_listed([name for name in own if name not in kept])} of virtual worker {index} hold something that does not"
        " travel between processes, which only tensors, numbers, strings, None, and lists, tuples and dicts of them do;"
        " a run that resumes from the checkpoint takes virtual worker 0's",
        stacklevel=2,
    )
    return _written(kept) or b""


def _written(values: dict[str, Any]) -> memoryview | None:
    """Return ``values`` as bytes, or None if :func:`_unpacked` could not read them."""
    buffer = io.BytesIO()
    try:
        torch.save(values, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="meta", weights_only=True)  # reads no storage
    except Exception:  # of any type that a user's class raises
        return None
    return buffer.getbuffer()


def _mapped(file: IO[bytes]) -> Tensor:
    """Close ``file``, and return its content as a tensor of bytes that takes no memory."""
    with file:
        file.flush()
        return torch.frombuffer(mmap.mmap(file.fileno(), file.tell(), access=mmap.ACCESS_COPY), dtype=torch.uint8)


class _Reader(io.RawIOBase):
    """File over ``content``, without a copy of all of it."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._content)}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._content[self._at :][: len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def _unpacked(state: Tensor, path: str | Path, index: int) -> dict[str, Any]:
    try:
        file = io.BufferedReader(_Reader(state.numpy().data))
        own: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise SettingError(
            f"ckpt_path={str(path)!r} holds a state of virtual worker {index} that cannot be read ({error}); resume"
            " from another checkpoint"
        ) from None
    return own


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(str, names))
