"""A gather of any size, as gathers of pieces: servers keep two of those at a time, and take no large ones.

The first piece tells how many bytes there will be. So after the first gather all know how many more there are, and all
take part in each of them, also those who have given everything. Whoever is gone before it has is left out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

PIECE = 16 << 20
"""Bytes of content in a piece, fewer than servers take."""

_TOTAL = struct.Struct("<Q")


def gather_in_pieces(
    content: bytes | memoryview, gather: Callable[[bytes], dict[int, bytes]], piece: int = PIECE, keep: bool = True
) -> dict[int, bytearray]:
    """What all have given that take part to the end, by virtual worker.

    Bound: the sum of what is given, if it is kept, and one gather's pieces.

    Args:
        content: One's own.
        gather: One gather: takes a piece, gives everyone's. Called equally often by all.
        piece: Bytes of content in a piece, the same for all.
        keep: Whether the contents are wanted here; they are empty, else.

    Raises:
        RuntimeError: if somebody's pieces are not those that it has announced.
    """
    first = gather(_TOTAL.pack(len(content)) + bytes(content[:piece]))
    totals = {vw: _total(vw, part) for vw, part in first.items()}
    found = {vw: bytearray() for vw in first}
    parts = {vw: part[_TOTAL.size :] for vw, part in first.items()}
    for start in range(0, max([1, *totals.values()]), piece):
        if start:
            if all(totals[vw] <= start for vw in found):  # who announced the most is gone
                break
            parts = gather(bytes(content[start : start + piece]))
        for vw, whole in list(found.items()):
            due = min(piece, max(0, totals[vw] - start))
            if vw not in parts and due:
                del found[vw]
            elif len(parts.get(vw, b"")) != due:
                raise RuntimeError(
                    f"virtual worker {vw} gave {len(parts[vw])} bytes to a gather where {due} were due; are all of one"
                    " release?"
                )
            elif keep:
                whole += parts.get(vw, b"")
    return found


def _total(vw: int, part: bytes) -> int:
    if len(part) < _TOTAL.size:
        raise RuntimeError(f"virtual worker {vw} gave {len(part)} bytes to a gather; are all of one release?")
    total: int = _TOTAL.unpack_from(part)[0]
    return total
