"""Memory that a process has of its own, other than files that it has mapped."""

from __future__ import annotations

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


class Peak:
    """The most bytes that this process holds after any call of a C function in this thread, beyond those at the start.

    Copies are made and dropped in such calls' callers, so that none goes unseen; a clock would miss short ones.
    """

    def __enter__(self) -> Self:
        self.bytes = 0
        self._before = anonymous_bytes()
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: object, event: str, argument: object) -> None:
        if event == "c_return":
            self.bytes = max(self.bytes, anonymous_bytes() - self._before)
