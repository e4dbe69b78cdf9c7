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


def portions(buffers: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Divide buffers from `flat` into portions of ``size`` bytes. A portion is a list of parts of buffers."""
    portion: list[memoryview] = []
    left = size
    for buffer in buffers:
        start = 0
        while start < len(buffer):
            part = buffer[start : start + left]
            portion.append(part)
            start += len(part)
            left -= len(part)
            if not left:
                yield portion
                portion, left = [], size
    if portion:
        yield portion


class Filling:
    """Buffers from `flat` that :meth:`write` fills in order by pieces of any size."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = iter(buffers)
        self._current = memoryview(b"")
        self.left = total(buffers)
        """Bytes that are still to come."""

    def write(self, data: memoryview | bytes) -> None:
        """Copy ``data`` behind the earlier pieces. If it does not fit, write nothing and raise ValueError."""
        rest = memoryview(data)
        if len(rest) > self.left:
            raise ValueError(f"{len(rest)} bytes came where {self.left} were still expected")
        self.left -= len(rest)
        while rest:
            if not self._current:
                self._current = next(self._buffers)
            count = min(len(rest), len(self._current))
            copy(self._current[:count], rest[:count])
            self._current, rest = self._current[count:], rest[count:]
