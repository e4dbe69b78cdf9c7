"""A gather of any size, as a sequence of gathers of chunks: servers keep two at a time, and take no large ones.

The first chunk begins with the total of bytes. So after the first gather all know how many more follow, and all take
part in each of them, also those that have given everything. A virtual worker that is gone before that is left out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

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

    Bound: one gather's chunks.

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
