"""Gathers of values and of large contents, in what virtual workers exchange as bytes."""

from __future__ import annotations

import io
import pickle
import struct
from collections import defaultdict
from collections.abc import Callable
from typing import IO, Any

import torch

from lightning_hetpipe.errors import SettingError

CHUNK = 16 << 20
"""Bytes of content in a chunk, fewer than servers take."""

_TOTAL = struct.Struct("<Q")


def gather_in_chunks(
    content: bytes | memoryview,
    gather: Callable[[bytes], dict[int, bytes]],
    take: Callable[[int, bytes], object],
    chunk: int = CHUNK,
) -> list[int]:
    """Hand everyone's content to ``take``, in parts; return the virtual workers whose content came whole.

    Servers keep two gathers at a time, and take no large ones. The first chunk begins with the total of bytes. So after
    the first gather all know how many more follow, and all take part in each of them, also those that have given
    everything. A virtual worker that is gone before that is left out. Bound: one gather's chunks.

    Args:
        content: The content of this one.
        gather: One gather: takes a chunk, gives everyone's. Called equally often by all.
        take: Takes a virtual worker and the next part of its content, which is not empty.
        chunk: Bytes of content in a chunk, the same for all.

    Raises:
        RuntimeError: if a virtual worker gives other chunks than it has announced.
    """
    first = gather(_TOTAL.pack(len(content)) + bytes(content[:chunk]))
    totals = {vw: _total(vw, part) for vw, part in first.items()}
    found = list(first)
    parts = {vw: part[_TOTAL.size :] for vw, part in first.items()}
    for start in range(0, max([1, *totals.values()]), chunk):
        if start:
            if all(totals[vw] <= start for vw in found):  # who announced the most is gone
                break
            parts = gather(bytes(content[start : start + chunk]))
        for vw in list(found):
            due = min(chunk, max(0, totals[vw] - start))
            if vw not in parts and due:
                found.remove(vw)
            elif len(parts.get(vw, b"")) != due:
                raise RuntimeError(
                    f"virtual worker {vw} gave {len(parts[vw])} bytes to a gather where {due} were due; are all of one"
                    " release?"
                )
            elif due:
                take(vw, parts[vw])
    return found


def _total(vw: int, part: bytes) -> int:
    if len(part) < _TOTAL.size:
        raise RuntimeError(f"virtual worker {vw} gave {len(part)} bytes to a gather; are all of one release?")
    total: int = _TOTAL.unpack_from(part)[0]
    return total


Exchange = Callable[[bytes | memoryview, Callable[[int, bytes], object]], list[int]]
"""Gives one's own bytes, and takes everyone's in parts; returns the virtual workers whose bytes came whole."""


def gather_values(exchange: Exchange, index: int, value: Any, what: str, unequal: bool) -> list[Any]:
    """The values of all virtual workers that take part, in their order.

    Args:
        exchange: Called once.
        index: Number of this virtual worker.
        value: Tensors, numbers, strings, None, and lists, tuples and dicts of them, of any size.
        what: Names the call, which must be the same on all.
        unequal: Virtual workers have shares of their own, which is said if they make other calls.

    Raises:
        RuntimeError: if others have made another call.
        SettingError: if a value cannot be sent between processes.
    """
    buffer = io.BytesIO()
    torch.save((what, value), buffer)
    found: dict[int, bytearray] = defaultdict(bytearray)
    whole = exchange(buffer.getbuffer(), lambda vw, part: found[vw].extend(part))
    parts = {vw: _loaded(found[vw], vw) for vw in sorted(whole)}
    if others := [vw for vw, (theirs, _) in parts.items() if theirs != what]:
        raise RuntimeError(
            f"virtual worker {index} called {what}, while virtual worker {others[0]} called"
            f" {parts[others[0]][0]}: such a call has to be made by all of them, in the same order; look for one"
            " that only some make, such as below `if trainer.is_global_zero:`"
            + (", or in a step of a validation or test, where shares give them other numbers of batches" * unequal)
        )
    return [theirs for _, theirs in parts.values()]


def collect_contents(
    exchange: Exchange,
    index: int,
    size: int,
    content: Callable[[], bytes | memoryview],
    opened: Callable[[], IO[bytes]],
) -> dict[int, IO[bytes]]:
    """On virtual worker 0 the contents of the others, one after the other, by their index; nothing on those.

    Args:
        exchange: Called for each of the others.
        index: Number of this virtual worker.
        size: N.
        content, opened: As for ``Group.collect``.
    """

    def collected(due: int) -> IO[bytes] | None:
        file = opened() if index == 0 else None
        mine = content() if index == due else b""
        whole = exchange(mine, lambda vw, part: None if file is None else file.write(part))
        return file if due in whole else None

    files = {due: collected(due) for due in range(1, size)}
    return {due: file for due, file in files.items() if file is not None}


def _loaded(part: bytearray, vw: int) -> tuple[str, Any]:
    try:
        loaded: tuple[str, Any] = torch.load(io.BytesIO(part), weights_only=True)
    except pickle.UnpicklingError:
        raise SettingError(
            f"virtual worker {vw} gave the others a value that cannot be sent between processes, as only tensors,"
            " numbers, strings, None, and lists, tuples and dicts of them can; convert it to one of these"
        ) from None
    return loaded
