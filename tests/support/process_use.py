"""Share that a process takes of its machine."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Use(NamedTuple):
    """A process's share of its machine; memory in bytes."""

    memory: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Use:
        process = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        kilobytes = int(status["VmRSS"].split()[0])
        return cls(kilobytes << 10, len([*(process / "fd").iterdir()]), int(status["Threads"]))
