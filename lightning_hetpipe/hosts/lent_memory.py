"""Memory in which tensors of messages go to another process of this machine: written once, and sent nowhere.

A block is lent with one message. Whoever receives that has its tensors to change and to keep, and once nothing refers
to them any more, the block goes back with one of its own messages, so that few blocks serve all minibatches.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

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
    """Blocks of this process that are lent to the other one, and those that came back."""

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
