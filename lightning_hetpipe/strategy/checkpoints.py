"""Checkpoint files: an interrupted save leaves the old file as it was, and loading maps the file into memory."""

from __future__ import annotations

import copy
import errno
import mmap
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from torch.serialization import set_default_mmap_options

MAPPED = ("state_dict", "optimizer_states", "hetpipe")
"""Keys of a checkpoint whose tensors stay in the mapped file, because the strategy copies them one by one."""


class ReplacingCheckpointIO(TorchCheckpointIO):
    """Lightning's CheckpointIO, which writes and reads local files without a whole copy in memory.

    Saving writes a new file beside the old one, then replaces the old file in one step. (Lightning itself makes the
    whole file in memory, then in the system's temporary folder. From another disk it is copied over the old file, which
    a kill in the middle cuts off.)

    Loading returns tensors in a private mapping of the file. The mapping survives if the file is replaced or deleted,
    but not if somebody truncates the file in place. So a run must copy what it keeps.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        folder = local_folder(path)
        if folder is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = Path(path)
        beside = folder / f".{place.name}.part"  # if a save was killed, the next save overwrites this file
        try:
            with explaining(place):
                write(checkpoint, beside)
                os.replace(beside, place)
        except BaseException:
            with suppress(FileNotFoundError):
                beside.unlink()
            raise

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        mapped = None
        if _may_be_mapped(path):
            with suppress(Exception):  # such as of a file system that maps no files; others recur below
                before = _identity(path)
                with set_default_mmap_options(mmap.MAP_PRIVATE):
                    mapped = torch.load(path, map_location=map_location, mmap=True, weights_only=weights_only)
                if _identity(path) != before:  # torch may have read two files
                    mapped = None
        if mapped is not None:
            try:
                rest = copy.deepcopy({name: value for name, value in mapped.items() if name not in MAPPED})
                return {name: rest.get(name, value) for name, value in mapped.items()}
            except Exception as error:  # raised by the code of an object in the checkpoint
                warnings.warn(
                    f"the checkpoint {path} is read into memory as a whole, as something in it cannot be copied:"
                    f" {type(error).__name__}: {error}",
                    stacklevel=2,
                )
        return super().load_checkpoint(path, map_location, weights_only)


def write(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write ``checkpoint`` to the local ``path``, over an existing file, and flush it to the disk."""
    with _File(FileIO(path, "w")) as file:
        try:
            torch.save(checkpoint, file)
        except RuntimeError:
            if file.failure is None:
                raise
            raise file.failure from None  # torch's own error only says that it cannot end the archive
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def explaining(path: str | Path) -> Iterator[None]:
    """Context manager. An OSError inside it names the checkpoint that is not written, and the way out."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        room = "make room, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        what = (
            f"{error.strerror}; the checkpoint was not written, and what was there before is as it was: {room}save"
            " elsewhere, by ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...)"
        )
        raise OSError(error.errno, what, str(path)) from error


def local_folder(path: str | Path) -> Path | None:
    """Make and return the folder of a local ``path``. Return None if the path is of another file system."""
    if "://" in str(path):
        return None
    folder = Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class _File(BufferedWriter):
    """File that keeps the last error of a write."""

    failure: BaseException | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BaseException as failure:
            self.failure = failure
            raise


def _may_be_mapped(path: str | Path) -> bool:
    """Return whether ``path`` is a local, uncompressed zip file, as ``torch.save`` writes since torch 1.6."""
    if os.name != "posix" or "://" in str(path) or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())


def _identity(path: str | Path) -> tuple[int, ...]:
    """Return attributes that differ between the file at ``path`` and a later file in its place."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def filled(io: CheckpointIO | None) -> CheckpointIO | None:
    """Return ``io``. An empty wrapper, such as ``AsyncCheckpointIO()``, is filled with a ReplacingCheckpointIO."""
    inside: Any = io
    if io is not None and getattr(io, "checkpoint_io", io) is None:
        inside.checkpoint_io = ReplacingCheckpointIO()
    return io
