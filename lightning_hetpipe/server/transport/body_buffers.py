"""Bodies as sequences of buffers: read in portions, filled in order, copied without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

_SMALL = 1 << 14  # bytes below which numpy's own overhead is more than the lock is worth


def flat(buffers: Iterable[memoryview]) -> list[memoryview]:
    """Return the non-empty buffers as bytes. Raise TypeError for a buffer that is not contiguous."""
    return [buffer.cast("B") for buffer in buffers if buffer.nbytes]


def total(buffers: Iterable[memoryview]) -> int:
    """Return the number of bytes in all buffers."""
    return sum(buffer.nbytes for buffer in buffers)


def copy(target: memoryview, source: memoryview | bytes) -> None:
    """Copy ``source`` to ``target`` of equal size. Unlike a slice's assignment, let other Python threads run."""
    if len(source) < _SMALL:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def portions(buffers: Sequence[memoryview], size: int) -> Iterator[bytes]:
    """Divide buffers from `flat` into portions of ``size`` bytes, which may go over several buffers."""
    parts: list[memoryview] = []
    left = size
    for buffer in buffers:
        start = 0
        while start < len(buffer):
            part = buffer[start : start + left]
            parts.append(part)
            start += len(part)
            left -= len(part)
            if not left:
                yield b"".join(parts)
                parts, left = [], size
    if parts:
        yield b"".join(parts)


def fill(buffers: Sequence[memoryview], pieces: Iterator[bytes | memoryview]) -> int:
    """Fill buffers from `flat` in order by pieces of any size. Return the number of bytes that are missing, if the
    pieces end before, or the next piece is empty or does not fit."""
    rest, current, left = iter(buffers), memoryview(b""), total(buffers)
    while left:
        data = memoryview(next(pieces, b""))
        if not 0 < len(data) <= left:
            break
        left -= len(data)
        while data:
            current = current or next(rest)
            count = min(len(data), len(current))
            copy(current[:count], data[:count])
            current, data = current[count:], data[count:]
    return left
