"""Everything that a program holds, its descendants' too, and what of that is still there later."""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.forks import command_of

SECONDS = 300.0
"""Until a process counts as left behind: many times what it takes on a busy machine."""


@dataclass
class Holdings:
    """Belongings at one moment of the processes that have ``tag`` in their environment.

    Attributes:
        processes: A descriptor of each, which becomes readable when it ends, and its command.
        sockets: Listening ones, by inode.
        shared: Files in /dev/shm.
    """

    tag: str
    processes: dict[int, str] = field(default_factory=dict)
    sockets: set[str] = field(default_factory=set)
    shared: set[Path] = field(default_factory=set)

    @classmethod
    def of(cls, tag: str) -> Holdings:
        found = cls(tag)
        for pid in running(tag):
            try:
                found._add(pid)
            except OSError:  # it has just ended
                continue
        return found

    def _add(self, pid: int) -> None:
        own = Path(f"/proc/{pid}")
        command = command_of(pid)
        opened = []
        for each in (own / "fd").iterdir():
            with suppress(FileNotFoundError):  # it has just been closed
                opened.append(os.readlink(each))
        mapped = [line.split(maxsplit=5)[-1] for line in (own / "maps").read_text().splitlines()]
        inodes = {name[len("socket:[") : -1] for name in opened if name.startswith("socket:[")}
        self.sockets |= inodes & listening()
        self.shared |= {Path(name) for name in (*opened, *mapped) if name.startswith("/dev/shm/")}
        self.processes[os.pidfd_open(pid)] = command

    def left(self) -> list[str]:
        """Leftovers once all these processes have ended, or have had their time to."""
        deadline = time.monotonic() + SECONDS
        waiting = dict(self.processes)
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for ended in select.select([*waiting], [], [], remaining)[0]:
                del waiting[ended]
        others = [f"process {pid}" for pid in running(self.tag)]
        sockets = [f"socket {inode}" for inode in sorted(self.sockets & listening())]
        return [*waiting.values(), *others, *sockets, *(str(path) for path in self.shared if path.exists())]

    def close(self) -> None:
        """Ends what is left, for the sake of the tests that follow."""
        for pid in running(self.tag):
            os.kill(pid, 9)
        for descriptor in self.processes:
            os.close(descriptor)


def running(tag: str) -> list[int]:
    """The processes that have ``tag`` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if tag.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # another user's, or it has just ended
            continue
    return found


def listening() -> set[str]:
    """Inodes of this machine's listening TCP and UNIX sockets."""
    tcp = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {fields[9] for fields in tcp if fields[3] == "0A"} | {
        fields[6] for fields in unix if fields[3] != "00000000"
    }
