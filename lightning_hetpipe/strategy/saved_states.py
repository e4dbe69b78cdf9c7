"""This package's part of a checkpoint: Nm, N, and the training state of each virtual worker.

Lightning's own keys hold virtual worker 0's state, so that any strategy resumes from the file and any program loads it.
The state of virtual worker i is beside them, as bytes that only virtual worker i reads. If it resumes, its state
replaces virtual worker 0's. Weights and buffers are in the file once.
"""

from __future__ import annotations

import io
import mmap
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.rules.waves import whole_steps

if TYPE_CHECKING:
    from lightning_hetpipe.workers.group import Group
    from lightning_hetpipe.workers.shared_data import Shares

_NOTE = "hetpipe"

LAST_CHANGES = "hetpipe_last_changes"
"""Key of the last step's changes, by which some weight policies predict weights."""

OWN = ("optimizer_states", "lr_schedulers", "loops", "callbacks", "global_step", LAST_CHANGES)
"""Keys of the state that differs between virtual workers. The precision plugin adds its key."""

_ROUNDED = "rounded"


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
    """Turn ``checkpoint`` into that of virtual worker ``index`` of ``size``, free other states, return ``rounded``.

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
