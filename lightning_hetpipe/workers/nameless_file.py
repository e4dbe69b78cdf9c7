"""A file without a name, which goes with the process that has opened it, however that ends."""

from __future__ import annotations

import tempfile
from pathlib import Path


class NamelessFile:
    """An empty file in the system's folder for temporary ones, for code that wants a path."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="hetpipe-")  # noqa: SIM115

    @property
    def path(self) -> Path:
        """The path by which this process opens it."""
        return Path("/dev/fd", str(self._file.fileno()))

    def close(self) -> None:
        """Delete it."""
        self._file.close()
