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
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_hetpipe.hosts import orders
from lightning_hetpipe.hosts.secured_socket import Connection
from lightning_hetpipe.pipeline import message_code
from lightning_hetpipe.pipeline.plain_code import NotPlain, PlainCode, Take
from lightning_hetpipe.server.transport.shared_memory import NoBlock, Place, Views, place_of, shared

ALIGNED = 64

MOST_LENT = 64
"""Blocks that are lent at a time, as each takes a descriptor; what is kept beyond that is sent through the socket."""


LATEST = 100
"""Messages with large tensors after which a block goes that none of them has needed."""


class _LentBlock(NamedTuple):
    """A block of this process; ``used`` counts the messages until it was lent last."""

    memory: memoryview
    place: Place
    used: int


class LentMemory:
    """Blocks of this process that are lent to the other one, and those that came back.

    A block is lent with one message. Whoever receives that has its tensors to change and to keep, and once nothing
    refers to them any more, the block goes back with one of its own messages, so that few blocks serve all minibatches.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lent: dict[int, _LentBlock] = {}
        self._idle: list[_LentBlock] = []
        self._messages = 0

    def lend(self, parts: list[memoryview]) -> Place | None:
        """Copy ``parts`` into a block; None if there is none for them."""
        with self._lock:
            block = self._block(sum(_aligned(len(part)) for part in parts))
        if block is None:
            return None
        array, first = np.frombuffer(block.memory, np.uint8), 0
        for part in parts:
            array[first : first + len(part)] = np.frombuffer(part, np.uint8)  # without the GIL, unlike a memoryview
            first += _aligned(len(part))
        return block.place

    def take_back(self, inodes: list[int]) -> None:
        """Have the blocks back that the other process needs no more."""
        with self._lock:
            self._idle += [self._lent.pop(inode) for inode in inodes]

    def _block(self, size: int) -> _LentBlock | None:
        self._messages += 1
        self._idle = [block for block in self._idle if self._messages - block.used < LATEST]
        fitting = [block for block in self._idle if size <= len(block.memory) <= 2 * size]
        if fitting:
            block = min(fitting, key=lambda each: len(each.memory))
            self._idle.remove(block)
        elif len(self._lent) == MOST_LENT:
            return None
        else:
            try:
                memory = shared(size)
            except NoBlock:
                return None
            place = place_of([memory])
            assert place is not None
            block = _LentBlock(memory, place, 0)
        self._lent[block.place.inode] = block = block._replace(used=self._messages)
        return block


class BorrowedMemory:
    """Blocks that the other process has lent to this one."""

    def __init__(self) -> None:
        self._views = Views(writes=True)
        self._unneeded: list[int] = []

    def borrow(self, place: Place) -> Borrowed:
        """The block at ``place``, until nothing refers to a tensor in it.

        Raises:
            NoBlock: if it cannot be seen.
        """
        array: Any = np.frombuffer(self._views.look(place), np.uint8)
        weakref.finalize(array, self._unneeded.append, place.inode).atexit = False
        return Borrowed(array)

    def unneeded(self) -> list[int]:
        """The blocks that are not needed any more, once."""
        return [self._unneeded.pop() for _ in range(len(self._unneeded))]  # while others may be appended


class Borrowed:
    """A block from which tensors are taken, one after the other."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self._first = 0

    def take(self, length: int) -> Tensor:
        """The next ``length`` bytes, as a tensor whose memory no other tensor has."""
        first, self._first = self._first, self._first + _aligned(length)
        return torch.frombuffer(self._array, dtype=torch.uint8, offset=first, count=length)


def _aligned(length: int) -> int:
    return -(-length // ALIGNED) * ALIGNED


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
