"""Shared memory: blocks of a process that other processes on its host map, so that bodies need no sockets.

Each process writes only its own blocks, and maps blocks of other processes to read them. The server adds a VW's update
from the VW's block, and VWs copy weights from the server's block. So a body is copied at most once. A process that is
fenced, stopped or faulty can spoil only its own memory.

A block is a *memfd*: memory with a descriptor and no name. So it vanishes however its owner dies, and no limit of
/dev/shm applies. Python's resource tracker, which unlinks memory that a process merely attached, does not see it.
Readers open it as ``/proc/<pid>/fd/<number>``, which the kernel allows only to the same user. Its size is sealed:
shrinking it would kill a reader (SIGBUS). A secret in the block proves that both sides see the same memory. If they do
not (another host, pid namespace or user, or not Linux), bodies go through messages. Bodies also do so between network
namespaces, which separate processes on purpose.

Bounds: a block takes the requested bytes and a page. Mapping takes a fifth of a second for each GiB, so readers keep
their mappings. If the owner frees a block, its mapping holds the memory until the reader's next call to any process.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hmac
import logging
import mmap
import os
import re
import secrets
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

LEAST = 1 << 18
"""Bytes of the smallest block that is worth a page and a descriptor."""

_SECRET = 32  # characters
_FIRST = mmap.PAGESIZE  # offset of the usable bytes; the secret lies before
_NAME = "hetpipe"
_LINK = re.compile(rf"/memfd:{_NAME}(?: \(deleted\))?")
_POPULATE_READ = 22  # madvise's MADV_POPULATE_READ, from Linux 5.14 on, which Python does not name before 3.13

_LOG = logging.getLogger(__name__)


class NoBlock(Exception):
    """Error that shared memory cannot be made or seen. The message has the reason."""


@dataclass(frozen=True)
class Place:
    """Location of bytes in a block, for another process. It is untrusted, because it may come from anybody."""

    network: int
    pid: int
    descriptor: int
    inode: int
    secret: str
    start: int
    size: int

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.descriptor}"


_own: dict[int, Place] = {}  # without a lock: blocks may be freed anywhere, also while a lock is held
"""Blocks of this process, by the address of their first usable byte."""


class _Block(mmap.mmap):
    """Mapping of a block of this process. While the mapping exists, the block is in `_own`."""

    address = 0

    def __del__(self) -> None:  # runs before the address is used again, unlike a weak reference's callback
        if self.address:
            os.close(_own.pop(self.address).descriptor)


def shared(size: int) -> memoryview:
    """Return a block of ``size`` reserved bytes, which exists while an object refers to it. Raise NoBlock if this
    system has no shared memory, or not enough."""
    if not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_ADD_SEALS"):
        raise NoBlock("this system has no memory without a name (memfd)")
    try:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise NoBlock(f"it cannot be made ({error.strerror})") from None
    try:
        # Otherwise missing memory would show only at the first write, as SIGBUS.
        os.posix_fallocate(descriptor, 0, _FIRST + size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        secret = secrets.token_hex(_SECRET // 2)
        os.pwrite(descriptor, secret.encode(), 0)
        own = Place(_network(), os.getpid(), descriptor, os.fstat(descriptor).st_ino, secret, start=0, size=size)
        block = _Block(descriptor, _FIRST + size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    except (OSError, ValueError) as error:
        os.close(descriptor)
        raise NoBlock(f"there is no memory for {size} bytes of it ({error})") from None
    memory = memoryview(block)[_FIRST:]
    _own[_address(memory)] = own
    block.address = _address(memory)
    return memory


def memory(size: int) -> memoryview:
    """Return ``size`` zeroed bytes, in shared memory if they are at least `LEAST` and it is available."""
    if size >= LEAST:
        try:
            return shared(size)
        except NoBlock as no:
            _say_once(f"this process shares no memory with others on its host: {no}")
    return memoryview(np.zeros(size, np.uint8))  # type: ignore[arg-type]  # arrays are buffers


def place_of(buffers: Sequence[memoryview]) -> Place | None:
    """Return the place of ``buffers`` in one block of this process, or None. Each buffer must be non-empty, and begin
    where the buffer before ends."""
    if not buffers:
        return None
    start = end = _address(buffers[0])
    for buffer in buffers:
        if _address(buffer) != end:
            return None
        end += len(buffer)
    for first, own in _own.copy().items():
        if first <= start and end <= first + own.size:
            # This process may be a fork of the process that made the block, or have another network meanwhile.
            return replace(own, network=_network(), pid=os.getpid(), start=start - first, size=end - start)
    return None


class Views:
    """Mappings of blocks of other processes, for reading."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._mapped: dict[tuple[int, str], tuple[Place, mmap.mmap]] = {}

    def look(self, place: Place) -> memoryview:
        """Map the bytes at ``place``. Other processes do not see writes to the mapping. Raise NoBlock if ``place`` is
        not in a block of this user on this host that holds the secret."""
        if min(place.start, place.size) < 0:
            raise NoBlock("its description is malformed")
        key = place.inode, place.secret
        with self._lock:
            self.drop()
            if key not in self._mapped:
                self._mapped[key] = place, _mapped(place)
            mapped = self._mapped[key][1]
        if place.start + place.size > len(mapped) - _FIRST:
            raise NoBlock(f"it is smaller than {place.start + place.size} bytes")
        return memoryview(mapped)[_FIRST + place.start :][: place.size]

    def drop(self) -> None:
        """Drop the blocks that their owners have freed. Their memory is freed when its last reference goes."""
        with self._lock:
            for key, (place, _) in list(self._mapped.items()):
                try:
                    there = os.stat(place.path).st_ino == place.inode
                except OSError:
                    there = False
                if not there:
                    del self._mapped[key]

    def close(self) -> None:
        """Drop all mappings."""
        with self._lock:
            self._mapped.clear()


def _network() -> int:
    return os.stat("/proc/self/ns/net").st_ino


def _mapped(place: Place) -> mmap.mmap:
    if place.network != _network():
        raise NoBlock("it is in another network namespace")
    try:
        # Open nothing but blocks: opening some files has effects.
        if not _LINK.fullmatch(os.readlink(place.path)):
            raise NoBlock("it is not where it is said to be")
        descriptor = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NoBlock(f"it cannot be seen from the other process ({error.strerror})") from None
    try:
        size = _verified(descriptor, place)
        # A private mapping: a mistaken write here does not reach the owner's memory.
        mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise NoBlock(f"it cannot be mapped ({error})") from None
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # an older Linux reads pages on demand
        mapped.madvise(_POPULATE_READ)
    return mapped


def _verified(descriptor: int, place: Place) -> int:
    """Check that the block is the block of ``place``, and return its size."""
    found = os.fstat(descriptor)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & seals == seals
    except OSError:
        sealed = False
    if not (stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_ino == place.inode and sealed):
        raise NoBlock("it is not a sealed block of this user's")
    if not hmac.compare_digest(os.pread(descriptor, _SECRET, 0), place.secret.encode()):
        raise NoBlock("it does not hold the secret")
    return found.st_size


def _address(buffer: memoryview) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


@functools.cache
def _say_once(sentence: str) -> None:
    _LOG.warning("hetpipe: %s; weights go by gRPC, which is slower", sentence)
