"""End of a run that was told to end, by SIGTERM or by SLURM: no failure, and one exit code for all of its processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities.exceptions import SIGTERMException

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a program that SIGTERM has ended, as shells report it."""

REASON = "told to end"
"""Reason that the others are told where a virtual worker leaves them."""


@contextmanager
def first_sigterm_ignored() -> Iterator[None]:
    """Within it, in the main thread, only a second SIGTERM ends this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, before) and None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ToldToEnd(SIGTERMException):
    """Raised once a run that was told to end is saved, or may be left.

    Args:
        alone: This virtual worker leaves, and the others go on without it; else all end, at a cut.
    """

    def __init__(self, alone: bool = False) -> None:
        super().__init__(TERMINATED)
        self.alone = alone
