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
    content: bytes | memoryview, gather: Callable[[bytes], dict[int, bytes]], piece: int = PIECE
) -> dict[int, bytes]:
    """What all have given that take part to the end, by virtual worker.

    Bound: the sum of what is given, and one gather's pieces.

    Args:
        content: One's own.
        gather: One gather: takes a piece, gives everyone's. Called equally often by all.
        piece: Bytes of content in a piece, the same for all.

    Raises:
        RuntimeError: if somebody's pieces are not those that it has announced.
    """
    first = gather(_TOTAL.pack(len(content)) + bytes(content[:piece]))
    totals = {vw: _total(vw, part) for vw, part in first.items()}
    found = {vw: bytearray() for vw in first}
    _take(found, totals, {vw: part[_TOTAL.size :] for vw, part in first.items()}, piece)
    for start in range(piece, max(totals.values(), default=0), piece):
        _take(found, totals, gather(bytes(content[start : start + piece])), piece)
        if all(len(found[vw]) == totals[vw] for vw in found):  # who announced the most is gone
            break
    return {vw: bytes(parts) for vw, parts in found.items()}


def _take(found: dict[int, bytearray], totals: dict[int, int], parts: dict[int, bytes], piece: int) -> None:
    for vw, whole in list(found.items()):
        due = min(piece, totals[vw] - len(whole))
        if vw not in parts and due:
            del found[vw]
        elif len(parts.get(vw, b"")) != due:
            raise RuntimeError(
                f"virtual worker {vw} gave {len(parts[vw])} bytes to a gather where {due} were due; are all of one"
                " release?"
            )
        else:
            whole += parts.get(vw, b"")


def _total(vw: int, part: bytes) -> int:
    if len(part) < _TOTAL.size:
        raise RuntimeError(f"virtual worker {vw} gave {len(part)} bytes to a gather; are all of one release?")
    total: int = _TOTAL.unpack_from(part)[0]
    return total
