"""Ends of a run: it has lost virtual workers, or a signal has ended it.

A run that has gone on without virtual workers names each of them, and the program exits with 1. Our launcher sees the
process of a child end. If torchrun, SLURM or the like started the processes, the coordinator of the servers says that a
lease has run out. On each node, the first process that is left speaks, and exits with 1.
"""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from types import FrameType

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hetpipe.errors import say
from lightning_hetpipe.server.process.signals import exit_now

_LAST = -1_000_000
"""The lowest of multiprocessing's priorities at exit; its own are -100 to 10."""


class Uncaught:
    """An exception that nobody has caught, and that ends this program.

    Python keeps the last one that it has printed, before anything that runs at exit. One from before this object was
    made is an earlier cell's of a notebook, or a test runner's. A notebook or a prompt goes on after such an exception.
    """

    def __init__(self) -> None:
        self._before = getattr(sys, "last_value", None)

    @property
    def error(self) -> BaseException | None:
        last: BaseException | None = getattr(sys, "last_value", None)
        return None if last is self._before or hasattr(sys, "ps1") else last


class LostWorkers:
    """The virtual workers that this process knows to be lost. Calls may come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[int] = set()
        self._unnamed: dict[int, str] = {}
        """Those that the end of the run is still to name, in words."""
        self._goes_without = False
        self._told = False  # of another failure
        self._failed = 0
        self._uncaught: Uncaught | None = None

    def note(self, vw: int, who: str, how: str, sentence: str) -> None:
        """Note that virtual worker ``vw`` is lost.

        Args:
            who: Its name.
            how: How it ended, such as "died by SIGKILL".
            sentence: Printed now; empty where that was done.
        """
        with self._lock:
            if vw in self._known or self._failed:
                return
            self._known.add(vw)
            self._goes_without = True
            self._unnamed[vw] = f"{who}, which {how}"
        if sentence:
            say(sentence)

    def has_lost(self, vw: int) -> bool:
        """Tell whether virtual worker ``vw`` is lost."""
        with self._lock:
            return vw in self._known

    def find(self, vw: int) -> None:
        """Note that virtual worker ``vw`` takes part again."""
        with self._lock:
            self._known.discard(vw)
            self._unnamed.pop(vw, None)
            self._goes_without = bool(self._known)

    def exit_with_one(self) -> None:
        """Have the program exit with 1, for another failure that this process has told of and gone on from."""
        self._told = True

    def name(self) -> None:
        """End a run: name those that it has gone on without."""
        with self._lock:
            unnamed, self._unnamed = self._unnamed, {}
            self._known.clear()
        if unnamed:
            say(f"this run went on without {', '.join(unnamed[vw] for vw in sorted(unnamed))}")

    def forget(self, code: int = 1) -> None:
        """Forget all, as the run has failed: an exception has told the program, whose exit code for it is ``code``."""
        with self._lock:
            self._known.clear()
            self._unnamed.clear()
            self._goes_without, self._told, self._failed = False, False, code

    @property
    def status(self) -> int:
        """The exit code of this program, as far as its last run and its end tell it."""
        error = None if self._uncaught is None else self._uncaught.error
        return self._failed or int(self._goes_without or self._told or error is not None)

    def watch(self) -> None:
        """Begin a run, whose lost workers the exit code tells; called before all else is registered for the exit."""
        self._failed = 0
        if self._uncaught is None:
            self._uncaught = Uncaught()
            atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        """Exit with 1, unless something has failed in this process, too, which has an exit code for that."""
        error = None if self._uncaught is None else self._uncaught.error
        if (self._goes_without or self._told) and not self._failed and error is None:
            self.name()
            # Python has its exit code by now. What multiprocessing does at exit comes late, and its last is this.
            Finalize(None, exit_now, args=(1,), exitpriority=_LAST)


def went_on_without(who: str, how: str) -> str:
    """The sentence on a virtual worker ``who`` that is lost, as it was ``how``, and without which the others go on."""
    return f"{who} is lost: it was {how}; the others go on without it"


lost_workers = LostWorkers()
"""Those that this process knows of."""


# Ends that were asked for.

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
