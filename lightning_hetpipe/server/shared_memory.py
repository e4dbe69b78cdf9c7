"""Blocks of memory that two processes of one host share, so that bodies need not pass through sockets.

A block is a *memfd*: memory with a descriptor and no name. So nothing is left behind however its owners die, no limit
of /dev/shm applies, and Python's resource tracker, which unlinks what attached processes merely opened, has no part in
it. The client makes the block; the server opens it as ``/proc/<pid>/fd/<number>``, which the kernel allows to the same
user only. Its size is sealed, so that nobody can cut it off under a reader, which would be killed by that (SIGBUS).
A secret in the block itself proves that both sides see the same memory; where they do not (another host, another pid
namespace, another user, not Linux) bodies go through messages.

Bodies of any size stream through a block: it has slots, used in turn, and a side fills one while the other empties the
one before: that costs no more memory than the slots, however large the body, and copying on one side overlaps copying
on the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import mmap
import os
import re
import secrets
import stat
import struct

from lightning_hetpipe.server.buffers import Filling, total

SLOTS = 3
SLOT = 8 << 20
"""Bytes of a slot. Measured: a signal costs as much CPU time as copying 1 to 2 MiB does."""

_SECRET = 16
_FIRST = mmap.PAGESIZE  # where slots begin; the secret stands before
_SIZE = _FIRST + SLOTS * SLOT
_DESCRIPTION = struct.Struct(f"<IIQ{_SECRET}s")
_NAME = "hetpipe"
_LINK = re.compile(rf"/memfd:{_NAME}(?: \(deleted\))?")


class NoBlock(Exception):
    """There is no shared memory here, or not this one; the sentence says why."""


class Block:
    """A mapped block; `description` tells another process which."""

    def __init__(self, descriptor: int, description: bytes) -> None:
        """Maps the memory of ``descriptor``, which becomes this object's."""
        self._descriptor = descriptor
        self.description = description
        try:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._map = mmap.mmap(descriptor, _SIZE, flags=flags)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise NoBlock(f"it cannot be mapped ({error})") from None

    @classmethod
    def make(cls) -> Block:
        """A new block, all of it reserved.

        Raises:
            NoBlock: if this system has none, or no memory for it.
        """
        if not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_ADD_SEALS"):
            raise NoBlock("this system has no memory without a name (memfd)")
        try:
            descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise NoBlock(f"it cannot be made ({error.strerror})") from None
        try:
            # Without this, memory that is not there would be missed at the first write, by a signal that kills.
            os.posix_fallocate(descriptor, 0, _SIZE)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            secret = secrets.token_bytes(_SECRET)
            os.pwrite(descriptor, secret, 0)
        except OSError as error:
            os.close(descriptor)
            raise NoBlock(f"no memory for {_SIZE} bytes of it ({error.strerror})") from None
        inode = os.fstat(descriptor).st_ino
        return cls(descriptor, _DESCRIPTION.pack(os.getpid(), descriptor, inode, secret))

    @classmethod
    def attach(cls, description: bytes) -> Block:
        """The block that another process described, or this one.

        Raises:
            NoBlock: if the description does not lead to a block of this user's on this host, with the secret in it.
        """
        if len(description) != _DESCRIPTION.size:
            raise NoBlock("its description is malformed")
        pid, number, inode, secret = _DESCRIPTION.unpack(description)
        path = f"/proc/{pid}/fd/{number}"
        try:
            # Whatever else may be open there is not touched: to open some files is to change something.
            if not _LINK.fullmatch(os.readlink(path)):
                raise NoBlock("it is not where it is said to be")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise NoBlock(f"it cannot be seen from the server's process ({error.strerror})") from None
        try:
            _verify(descriptor, inode, secret)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, description)

    def slot(self, index: int, size: int) -> memoryview:
        """The first ``size`` bytes of the slot whose turn comes at ``index`` (counted on and on)."""
        start = _FIRST + index % SLOTS * SLOT
        return memoryview(self._map)[start : start + size]

    def fill(self, index: int, parts: list[memoryview]) -> None:
        """Copies these parts, one behind the other, into the slot whose turn comes at ``index``.

        Raises:
            ValueError: if the block has been closed.
        """
        Filling([self.slot(index, total(parts))]).write_all(parts)

    def close(self) -> None:
        """Gives the memory back. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        with contextlib.suppress(BufferError):  # another thread is copying: the mapping goes with its last slot
            self._map.close()


def _verify(descriptor: int, inode: int, secret: bytes) -> None:
    found = os.fstat(descriptor)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & seals == seals
    except OSError:
        sealed = False
    if not (stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_ino == inode and sealed):
        raise NoBlock("it is not a sealed block of this user's")
    if found.st_size != _SIZE:
        raise NoBlock(f"it has {found.st_size} bytes instead of {_SIZE}")
    if not hmac.compare_digest(os.pread(descriptor, _SECRET, 0), secret):
        raise NoBlock("it does not hold the secret")
