"""Messages of a call and of its answer, as bytes: the first message, and bodies as sequences of buffers.

    | magic and version, 4 bytes | length, 4 bytes | JSON of an `Opening` or `Answer` of that length | header |

The header is the caller's or the handler's, or the sentence of a refusal. A body without a ``place`` follows in chunks.
A body with a ``place`` is read in shared memory. A call of one message has no chunks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Self

import numpy as np

from lightning_hetpipe.server.transport.codec import Codec, Malformed
from lightning_hetpipe.server.transport.interface import HEADER_LIMIT, RELEASE
from lightning_hetpipe.server.transport.shared_memory import Place
from lightning_hetpipe.settings import Bounds

CHUNK = 1 << 20
"""Bytes of a body in one message. Measured: with 4 MiB, a body takes a third more CPU time. gRPC copies a message
several times, and copies of this size stay in the cache."""

OVERHEAD = 4096
"""Largest number of bytes in a frame beside its header."""

ANY_SIZE = -1

_SMALL = 1 << 14  # bytes below which numpy's own overhead is more than the lock is worth

_MAGIC = b"HPT\x07"  # the last byte is the version of all that is sent, the protocol's messages included
_PREFIX = struct.Struct(">4sI")


class Outcome(Enum):
    """Kind of an answer."""

    REPLY = "reply"
    REFUSED = "refused"
    PLACE_UNREADABLE = "place_unreadable"
    """The server cannot read the body's place, for the reason in the header. The handler was not called."""
    REPLY_WITHOUT_PLACE = "reply_without_place"
    """The handler has run, but its reply's body does not lie in shared memory: repeat the call with chunks. So only
    calls that change nothing when they are repeated may accept a place in one message."""


class _Frame:
    """Fields in a first message, in front of the header."""

    def pack(self, header: bytes) -> bytes:
        """Encode the fields, and append ``header``. Raise ValueError if fields or header are too long."""
        if len(header) > HEADER_LIMIT:
            raise ValueError(f"{len(header)} bytes of header are more than a call takes")
        text = _CODEC.encode(self)
        return b"".join((_PREFIX.pack(_MAGIC, len(text)), text, header))

    @classmethod
    def unpack(cls, message: bytes) -> tuple[Self, bytes]:
        """Decode fields and header from untrusted bytes. Raise Malformed if they are not a frame of this class."""
        what = f"an {cls.__name__.lower()}"
        if len(message) < _PREFIX.size:
            raise Malformed(f"{what} is cut off")
        magic, length = _PREFIX.unpack_from(message)
        if magic != _MAGIC:
            other = f", but of version {magic[-1]} of these messages" if magic[:-1] == _MAGIC[:-1] else ""
            raise Malformed(
                f"this is not {what} of version {_MAGIC[-1]}{other}; client and server must be of one release of"
                f" lightning-hetpipe, and this process is of {RELEASE}"
            )
        end = _PREFIX.size + length
        if end > min(len(message), OVERHEAD) or len(message) - end > HEADER_LIMIT:
            raise Malformed(f"{what} is not as long as it says")
        frame = _CODEC.decode(message[_PREFIX.size : end])
        if not isinstance(frame, cls):
            raise Malformed(f"this is not {what}")
        return frame, message[end:]


@dataclass(frozen=True)
class Opening(_Frame):
    """First message of a call. Its body of ``size`` bytes lies at ``place``, or follows if that is None.

    ``room`` is the number of bytes reserved for the reply's body, or `ANY_SIZE` if the caller makes room for any size.
    With ``accepts_place``, the reply may give the place of its body instead of the body.
    """

    method: str
    size: Annotated[int, Bounds(0)]
    room: Annotated[int, Bounds(ANY_SIZE)]
    place: Place | None = None
    accepts_place: bool = False


@dataclass(frozen=True)
class Answer(_Frame):
    """First message of an answer. ``size`` and ``place`` describe the reply's body."""

    outcome: Outcome
    size: int = 0
    place: Place | None = None


_CODEC = Codec((Opening, Answer), OVERHEAD - _PREFIX.size)


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


def portions(buffers: Sequence[memoryview]) -> Iterator[bytes]:
    """Divide buffers from `flat` into portions of `CHUNK` bytes, which may go over several buffers."""
    parts: list[memoryview] = []
    left = CHUNK
    for buffer in buffers:
        start = 0
        while start < len(buffer):
            part = buffer[start : start + left]
            parts.append(part)
            start += len(part)
            left -= len(part)
            if not left:
                yield b"".join(parts)
                parts, left = [], CHUNK
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
