"""Checkpoint files that an interrupted save leaves as they were."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO


class ReplacingCheckpointIO(TorchCheckpointIO):
    """Lightning's own, but a local file is written beside its place, and takes it in one step when it is whole.

    (Lightning writes it into the system's folder for temporary files first; where that is on another disk, it is then
    copied over the old file, which a kill in the middle cuts off.)
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = Path(path)
        beside = place.with_name(f".{place.name}.part")  # of a save that was killed, the next one takes it away
        try:
            super().save_checkpoint(checkpoint, beside)
            with open(beside, "rb+") as written:
                os.fsync(written.fileno())
            os.replace(beside, place)
        except BaseException:
            with suppress(FileNotFoundError):
                beside.unlink()
            raise


def filled(io: CheckpointIO | None) -> CheckpointIO | None:
    """``io``; one that wraps another, such as ``AsyncCheckpointIO``, and was given none, wraps one that replaces."""
    inside: Any = io
    if io is not None and getattr(io, "checkpoint_io", io) is None:
        inside.checkpoint_io = ReplacingCheckpointIO()
    return io


def is_lightnings_own(io: CheckpointIO) -> bool:
    """Tell whether nobody has chosen ``io``."""
    return type(io) is TorchCheckpointIO
