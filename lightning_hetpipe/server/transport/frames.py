"""First messages of a call and of its answer, as bytes.

    | magic and version, 4 bytes | length, 4 bytes | JSON of an `Opening` or `Answer` of that length | header |

The header is the caller's or the handler's, or the sentence of a refusal. A body without a ``place`` follows in chunks;
a body with one lies in shared memory, and is read there. A call of one message has no chunks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from lightning_hetpipe.server.transport.codec import Codec, Malformed
from lightning_hetpipe.server.transport.interface import HEADER_LIMIT, RELEASE
from lightning_hetpipe.server.transport.shared_memory import Place

CHUNK = 1 << 20
"""Bytes of a body in one message. Measured: gRPC copies a message several times, and these copies stay in the cache;
with 4 MiB the same body takes a third more of CPU time."""

OVERHEAD = 4096
"""Bytes that a frame may have beside its header."""

ANY_SIZE = -1

_MAGIC = b"HPT\x06"  # the last byte is the version of all that is sent, the protocol's messages included
_PREFIX = struct.Struct(">4sI")


class Outcome(Enum):
    """Kind of an answer."""

    REPLY = "reply"
    REFUSED = "refused"
    PLACE_UNREADABLE = "place_unreadable"
    """The server cannot see where the body lies, for the reason in the header; the handler was not called."""
    REPLY_WITHOUT_PLACE = "reply_without_place"
    """The handler has run, but its reply's body does not lie in shared memory: call again with chunks. Only calls that
    change nothing when they are repeated may be made like that."""


@dataclass(frozen=True)
class Opening:
    """First message of a call.

    Attributes:
        size: bytes of the request's body.
        room: bytes that the caller has reserved for the reply's body; `ANY_SIZE` if it makes room for whatever comes.
        place: where the request's body lies, if it does not follow.
        accepts_place: whether the reply may give the place of its body instead of the body.
    """

    method: str
    size: int
    room: int
    place: Place | None = None
    accepts_place: bool = False

    def pack(self, header: bytes) -> bytes:
        """Encode, with ``header`` behind. Raises ValueError for a method or a header that is too long."""
        if len(header) > HEADER_LIMIT or len(self.method) > 255:
            raise ValueError(f"{len(header)} bytes of header, {len(self.method)} of method are more than a call takes")
        return _pack(self, header)

    @staticmethod
    def unpack(message: bytes) -> tuple[Opening, bytes]:
        """Decode an opening and its header from untrusted bytes. Raises Malformed."""
        opening, header = _unpack(Opening, message)
        if opening.size < 0 or opening.room < ANY_SIZE or len(opening.method) > 255:
            raise Malformed("an opening's fields are out of range")
        return opening, header


@dataclass(frozen=True)
class Answer:
    """First message of an answer; ``size`` and ``place`` are those of the reply's body."""

    outcome: Outcome
    size: int = 0
    place: Place | None = None

    def pack(self, header: bytes) -> bytes:
        """Encode, with ``header`` behind."""
        return _pack(self, header)

    @staticmethod
    def unpack(message: bytes) -> tuple[Answer, bytes]:
        """Decode an answer and its header from a server's bytes. Raises Malformed."""
        return _unpack(Answer, message)


Frame = TypeVar("Frame", Opening, Answer)
_CODEC = Codec((Opening, Answer), OVERHEAD - _PREFIX.size)


def _pack(frame: Opening | Answer, header: bytes) -> bytes:
    text = _CODEC.encode(frame)
    return b"".join((_PREFIX.pack(_MAGIC, len(text)), text, header))


def _unpack(kind: type[Frame], message: bytes) -> tuple[Frame, bytes]:
    what = f"an {kind.__name__.lower()}"
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
    if not isinstance(frame, kind):
        raise Malformed(f"this is not {what}")
    return frame, message[end:]
