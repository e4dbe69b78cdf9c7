"""End of a run that was told to end, by SIGTERM or by SLURM: no failure, and one exit code for all of its processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lightning.pytorch.utilities.exceptions import SIGTERMException

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a program that SIGTERM has ended, as shells report it."""

INTERRUPTED = 128 + signal.SIGINT
"""Likewise of one that Ctrl-C has ended."""

REASON = "told to end"
"""Reason that the others are told where a virtual worker leaves them."""


@contextmanager
def left_to_others() -> Iterator[None]:
    """Within it, in the main thread, SIGTERM ends this process only when it comes again, and SLURM's signals do not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}

    def told(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before[signal.SIGTERM])

    for each in before:
        signal.signal(each, told if each is signal.SIGTERM else signal.SIG_IGN)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class ToldToEnd(SIGTERMException):
    """Raised once a run that was told to end is saved, or may be left.

    Args:
        alone: This virtual worker leaves, and the others go on without it; else all end, at a cut.
    """

    def __init__(self, alone: bool = False) -> None:
        super().__init__(TERMINATED)
        self.alone = alone
