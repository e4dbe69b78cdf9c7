"""A virtual worker that waits in a batch, by the fault "pause" of tests.wsp.worker, until the test lets it go on."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.namespaces import finished
from tests.wsp.launch import SECONDS

NAMES = ("paused", "go on")


def prepare(folder: Path) -> None:
    """Make the pipes at which it waits."""
    for name in NAMES:
        os.mkfifo(folder / name)


@contextmanager
def paused(folder: Path, processes: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Within it the virtual worker waits; the launch's ``processes`` have to run until then."""
    waiting, going_on = (folder / name for name in NAMES)
    there = threading.Thread(target=waiting.read_text, name="test-paused", daemon=True)
    there.start()
    until = time.monotonic() + SECONDS
    while there.is_alive():
        assert all(process.poll() is None for process in processes), finished(processes, SECONDS)
        assert time.monotonic() < until, "the virtual worker has not come to its pause"
        there.join(0.5)
    yield
    threading.Thread(target=going_on.write_text, args=("",), name="test-go-on", daemon=True).start()
