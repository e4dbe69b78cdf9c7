"""Wire between two processes: messages as frames on a connected socket, in order.

    | lengths of note and text, 8 bytes each | note | text | the bytes of each tensor |

The bytes of large tensors go from the sender's tensor to the socket and from there into the receiver's tensor. On one
machine they do not travel: where the tensors of a message are large, the note names a block of memory that has them.
A socket takes them in pieces, for each of which both processes are woken, while stages compute on the same cores.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hetpipe.hosts import orders
from lightning_hetpipe.hosts.lent_memory import BorrowedMemory, LentMemory
from lightning_hetpipe.hosts.secured_socket import Connection
from lightning_hetpipe.pipeline import message_code
from lightning_hetpipe.pipeline.plain_code import NotPlain, PlainCode, Take
from lightning_hetpipe.server.transport.shared_memory import NoBlock, Place

_LENGTHS = struct.Struct(">QQ")

SMALL = 1 << 16
"""Bytes of tensors that are sent together with the text."""


LONGEST = 1 << 30
"""Bytes of the longest message, beside its tensors: graphs of large models take a few million."""


class Note(NamedTuple):
    """Memory of a message.

    Attributes:
        place: Of the block that is lent with its tensors; None if they follow the text.
        unneeded: Blocks of the other process that it has back, by their inodes.
    """

    place: Place | None
    unneeded: list[int]


CODE = PlainCode([*message_code.RECORDS, *orders.RECORDS, Note])


class Wire:
    """One end of the wire. Any thread may send; one receives.

    Args:
        connection: A socket.
        shares: Whether the other end is on this machine, and shares memory.
    """

    def __init__(self, connection: Connection, *, shares: bool = False) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._lent = LentMemory() if shares else None
        self._borrowed = BorrowedMemory()

    def send(self, message: Any) -> None:
        """Send ``message``; its tensors must stay as they are meanwhile.

        Raises:
            NotPlain: for what is no message.
            OSError: if the other process has ended.
        """
        text, tensors = CODE.write(message_code.to_record(message))
        place = None
        if self._lent is not None and sum(map(len, tensors)) > SMALL:
            place = self._lent.lend(tensors)
        with self._lock, self._whole():
            unneeded = self._borrowed.unneeded()
            note = CODE.write(Note(place, unneeded))[0] if place or unneeded else b""
            small = bytearray(_LENGTHS.pack(len(note), len(text)) + note + text)
            if place is not None:
                tensors = []
            for tensor in tensors:
                if len(tensor) > SMALL:
                    self._connection.sendall(small)
                    self._connection.sendall(tensor)
                    small = bytearray()
                else:
                    small += tensor
            self._connection.sendall(small)

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: if none comes any more.
            NotPlain: for bytes that are no message.
        """
        head = bytearray(_LENGTHS.size)
        self._fill(memoryview(head))
        if max(lengths := _LENGTHS.unpack(head)) > LONGEST:
            raise NotPlain(f"a message of {max(lengths)} bytes beside its tensors")
        note, text = map(bytearray, lengths)
        self._fill(memoryview(note))
        self._fill(memoryview(text))
        take = self._memory(CODE.read(bytes(note), self._take)) if note else self._take
        return message_code.of_record(CODE.read(bytes(text), take))

    def end(self) -> None:
        """Send nothing any more; what the other process has sent can still be received."""
        with suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Send a message whole, or none any more: where Ctrl-C interrupts it, nobody could read what follows."""
        try:
            yield
        except OSError:
            raise
        except BaseException:
            with suppress(OSError):  # it has ended
                self._connection.shutdown(socket.SHUT_RDWR)
            raise

    def _memory(self, note: Note) -> Take:
        """Take the tensors of the message with ``note`` from where they are."""
        if self._lent is None:
            raise NotPlain("memory that is lent between machines")
        try:
            self._lent.take_back(note.unneeded)
            return self._take if note.place is None else self._borrowed.borrow(note.place).take
        except (KeyError, NoBlock) as no:
            raise NotPlain(f"tensors in memory that is not there ({no})") from None

    def _take(self, length: int) -> Tensor:
        found = torch.empty(length, dtype=torch.uint8)
        array: Any = found.numpy()
        self._fill(memoryview(array))
        return found

    def _fill(self, memory: memoryview) -> None:
        while len(memory):
            try:
                count = self._connection.recv_into(memory)
            except OSError:  # it has ended, or its machine cannot be reached any more
                count = 0
            if not count:
                raise EOFError("the other process has ended")
            memory = memory[count:]


__all__ = ["CODE", "NotPlain", "Wire"]
