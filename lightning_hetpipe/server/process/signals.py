"""Signals that end a process which serves, for its main loop to read."""

from __future__ import annotations

import os
import signal
from types import FrameType


class Signals:
    """SIGTERM and SIGINT as bytes in a pipe: a signal handler may take no lock, so it cannot set an event."""

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = {each: signal.signal(each, self._note) for each in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():  # from here on a second one ends the process at once
            signal.signal(each, handler)
        os.close(self._read)
        os.close(self._write)

    def _note(self, number: int, frame: FrameType | None) -> None:
        os.write(self._write, bytes([number]))

    def fileno(self) -> int:
        """The descriptor that can be read once there was one."""
        return self._read

    def read(self) -> int:
        """Return the number of the first one that was not read."""
        return os.read(self._read, 1)[0]
