"""Memory that a process has of its own, other than files that it has mapped."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path
from typing import Self

PAGE = os.sysconf("SC_PAGE_SIZE")


def anonymous_bytes() -> int:
    """Resident bytes of this process that no file backs."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * PAGE


def is_mapped(path: Path) -> bool:
    """Tell whether the file at ``path``, or one that was there, is part of this process's memory."""
    return str(path.resolve()) in Path("/proc/self/maps").read_text()


_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD


def _trim() -> None:
    """Give back the pages that the allocator keeps, as otherwise it would do so at some later time.

    From now on it keeps no large block that is freed, though a fit asks for that: what is held is to be seen.
    """
    library = ctypes.CDLL(None)
    library.mallopt(_MMAP_THRESHOLD, 1 << 17)
    library.malloc_trim(0)


class Peak:
    """The most bytes that this process holds after any call of a C function in this thread, beyond those at the start.

    Copies are made and dropped in such calls' callers, so that none goes unseen; a clock would miss short ones.
    """

    def __enter__(self) -> Self:
        self.bytes = 0
        gc.collect()  # what earlier tests have left would be given back meanwhile
        gc.disable()
        _trim()
        self._before = anonymous_bytes()
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _look(self, frame: object, event: str, argument: object) -> None:
        if event == "c_return":
            self.bytes = max(self.bytes, anonymous_bytes() - self._before)
