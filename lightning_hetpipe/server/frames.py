"""The first messages of a call and of its answer, as bytes: a small, versioned, length-checked schema.

    opening   magic, carrier, lengths of method and header, sizes of body and of room for the reply's; method, header,
              and where the carrier is shared memory, which block
    answer    magic, outcome, length of header, size of body; header, or the sentence that refuses

What follows either is the body: in chunks, or as one `SIGNAL` for each slot of the block.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from lightning_hetpipe.server.transport import HEADER_LIMIT

CHUNK = 1 << 20
"""Bytes of a body in one message. Measured: gRPC copies a message several times, and these copies stay in the cache;
with 4 MiB the same body takes a third more of CPU time."""

SIGNAL = b"+"
"""A slot has been filled, or emptied."""

_MAGIC = b"HPT\x01"  # the last byte is the version
_OPENING = struct.Struct("<4sBHIQQ")
_ANSWER = struct.Struct("<4sBIQ")

OVERHEAD = _OPENING.size + 1024
"""Bytes that an opening may have beside method and header."""


class Malformed(Exception):
    """These bytes are not what this version of the transport sends."""


class Carrier(IntEnum):
    """How bodies come."""

    MESSAGES = 0
    BLOCK = 1


class Outcome(IntEnum):
    """How an answer begins."""

    REPLY = 0
    REFUSED = 1
    NO_BLOCK = 2
    """The block cannot be used from here, the header says why; nothing was asked of the handler."""


class Opening(NamedTuple):
    """How a call begins."""

    method: str
    header: bytes
    size: int
    room: int
    block: bytes = b""

    def pack(self) -> bytes:
        """As bytes. Raises ValueError for a method or a header that is too long."""
        method = self.method.encode()
        if len(self.header) > HEADER_LIMIT or len(method) > 255:
            raise ValueError(f"{len(self.header)} bytes of header, {len(method)} of method are more than a call takes")
        carrier = Carrier.BLOCK if self.block else Carrier.MESSAGES
        lengths = (len(method), len(self.header), self.size, self.room)
        return b"".join((_OPENING.pack(_MAGIC, carrier, *lengths), method, self.header, self.block))

    @classmethod
    def unpack(cls, message: bytes) -> Opening:
        """From bytes that anybody may have sent. Raises Malformed."""
        if len(message) < _OPENING.size:
            raise Malformed(f"an opening of {len(message)} bytes is cut off")
        magic, carrier, method_length, header_length, size, room = _OPENING.unpack_from(message)
        if magic != _MAGIC:
            raise Malformed("this is not an opening of this version; client and server must be of one release")
        if carrier not in tuple(Carrier) or method_length > 255 or header_length > HEADER_LIMIT:
            raise Malformed("an opening's fields are out of range")
        header_at = _OPENING.size + method_length
        block_at = header_at + header_length
        if len(message) < block_at or (len(message) > block_at) != (carrier == Carrier.BLOCK):
            raise Malformed(f"an opening of {len(message)} bytes is not as long as it says")
        try:
            method = message[_OPENING.size : header_at].decode()
        except UnicodeDecodeError:
            raise Malformed("a method's name is no text") from None
        return cls(method, message[header_at:block_at], size, room, message[block_at:])


class Answer(NamedTuple):
    """How an answer begins."""

    outcome: Outcome
    header: bytes
    size: int = 0

    def pack(self) -> bytes:
        """As bytes."""
        return _ANSWER.pack(_MAGIC, self.outcome, len(self.header), self.size) + self.header

    @classmethod
    def unpack(cls, message: bytes) -> Answer:
        """From bytes of a server. Raises Malformed."""
        if len(message) < _ANSWER.size:
            raise Malformed(f"an answer of {len(message)} bytes is cut off")
        magic, outcome, length, size = _ANSWER.unpack_from(message)
        if magic != _MAGIC or outcome not in tuple(Outcome) or len(message) != _ANSWER.size + length:
            raise Malformed("this is not an answer of this version; client and server must be of one release")
        return cls(Outcome(outcome), message[_ANSWER.size :], size)
