"""The first messages of a call and of its answer, as bytes: a small, versioned, length-checked schema.

    opening   magic, flags, lengths of method and header, sizes of body and of room for the reply's; method, header, and
              where the body lies, if it lies in memory that the server may be able to see
    answer    magic, outcome, length of header, size of body; header, or the sentence that refuses; where the body lies,
              if the opening said that the client may be able to see that

A body of which it is not said where it lies follows in chunks. To an answer that says it the client replies `READ`, or
`UNSEEN`, and then the chunks follow. A call of one message has no chunks and no such reply.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from lightning_hetpipe.server.transport.interface import HEADER_LIMIT

CHUNK = 1 << 20
"""Bytes of a body in one message. Measured: gRPC copies a message several times, and these copies stay in the cache;
with 4 MiB the same body takes a third more of CPU time."""

READ = b"+"
"""The reply's body has been copied from where it lies."""
UNSEEN = b"-"
"""The client cannot see where the reply's body lies."""

_MAGIC = b"HPT\x02"  # the last byte is the version
_OPENING = struct.Struct("<4sBHIQQ")
_ANSWER = struct.Struct("<4sBIQH")
_MAY_SEE = 1
_PLACED = 2

OVERHEAD = _OPENING.size + 1024
"""Bytes that an opening may have beside method and header."""


class Malformed(Exception):
    """These bytes are not what this version of the transport sends."""


class Outcome(IntEnum):
    """How an answer begins."""

    REPLY = 0
    REFUSED = 1
    UNSEEN = 2
    """The server cannot see where the body lies, the header says why; nothing was asked of the handler."""
    UNPLACED = 3
    """The handler has done its work, but its reply's body does not fit into a call of one message: ask for it in a call
    of many. Only what changes nothing when it is done twice may be asked for like that."""


class Opening(NamedTuple):
    """How a call begins."""

    method: str
    header: bytes
    size: int
    room: int
    place: bytes = b""
    """Where the body lies, as the server may see it; empty: it comes in chunks."""
    sees: bool = False
    """Whether the client may see where the reply's body lies."""

    def pack(self) -> bytes:
        """As bytes. Raises ValueError for a method or a header that is too long."""
        method = self.method.encode()
        if len(self.header) > HEADER_LIMIT or len(method) > 255:
            raise ValueError(f"{len(self.header)} bytes of header, {len(method)} of method are more than a call takes")
        flags = _MAY_SEE * self.sees | _PLACED * bool(self.place)
        lengths = (len(method), len(self.header), self.size, self.room)
        return b"".join((_OPENING.pack(_MAGIC, flags, *lengths), method, self.header, self.place))

    @classmethod
    def unpack(cls, message: bytes) -> Opening:
        """From bytes that anybody may have sent. Raises Malformed."""
        if len(message) < _OPENING.size:
            raise Malformed(f"an opening of {len(message)} bytes is cut off")
        magic, flags, method_length, header_length, size, room = _OPENING.unpack_from(message)
        if magic != _MAGIC:
            raise Malformed("this is not an opening of this version; client and server must be of one release")
        if flags & ~(_MAY_SEE | _PLACED) or method_length > 255 or header_length > HEADER_LIMIT:
            raise Malformed("an opening's fields are out of range")
        header_at = _OPENING.size + method_length
        place_at = header_at + header_length
        if len(message) < place_at or (len(message) > place_at) != bool(flags & _PLACED):
            raise Malformed(f"an opening of {len(message)} bytes is not as long as it says")
        try:
            method = message[_OPENING.size : header_at].decode()
        except UnicodeDecodeError:
            raise Malformed("a method's name is no text") from None
        return cls(method, message[header_at:place_at], size, room, message[place_at:], bool(flags & _MAY_SEE))


class Answer(NamedTuple):
    """How an answer begins."""

    outcome: Outcome
    header: bytes
    size: int = 0
    place: bytes = b""
    """Where the body lies; empty: it comes in chunks."""

    def pack(self) -> bytes:
        """As bytes."""
        lengths = (len(self.header), self.size, len(self.place))
        return b"".join((_ANSWER.pack(_MAGIC, self.outcome, *lengths), self.header, self.place))

    @classmethod
    def unpack(cls, message: bytes) -> Answer:
        """From bytes of a server. Raises Malformed."""
        if len(message) < _ANSWER.size:
            raise Malformed(f"an answer of {len(message)} bytes is cut off")
        magic, outcome, length, size, place_length = _ANSWER.unpack_from(message)
        place_at = _ANSWER.size + length
        if magic != _MAGIC or outcome not in tuple(Outcome) or len(message) != place_at + place_length:
            raise Malformed("this is not an answer of this version; client and server must be of one release")
        return cls(Outcome(outcome), message[_ANSWER.size : place_at], size, message[place_at:])
