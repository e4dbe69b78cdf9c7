"""Bodies as rows of buffers: read in portions, filled in order, copied without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

_SMALL = 1 << 14  # bytes below which numpy's own overhead is more than the lock is worth


def flat(buffers: Iterable[memoryview]) -> list[memoryview]:
    """The buffers as bytes, without the empty ones.

    Raises:
        TypeError: for a buffer that is not contiguous.
    """
    return [buffer.cast("B") for buffer in buffers if buffer.nbytes]


def total(buffers: Iterable[memoryview]) -> int:
    """Bytes in all of them."""
    return sum(buffer.nbytes for buffer in buffers)


def copy(target: memoryview, source: memoryview | bytes) -> None:
    """Copies bytes onto as many bytes; other threads of Python go on meanwhile, unlike with a slice's assignment."""
    if len(source) < _SMALL:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def portions(buffers: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Cuts what `flat` gave into portions of ``size`` bytes, the last one smaller; a portion is its parts."""
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
    """Buffers that are filled in order, whatever the sizes of what comes."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        """``buffers`` as `flat` gives them."""
        self._buffers = iter(buffers)
        self._current = memoryview(b"")
        self.left = total(buffers)
        """Bytes still to come."""

    def write(self, data: memoryview | bytes) -> None:
        """Copies ``data`` behind what came before.

        Raises:
            ValueError: if there is no room for it; nothing is written then.
        """
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
