"""Ends of a run: it has lost virtual workers, or a signal has ended it.

A run that has gone on without virtual workers names them, and the program exits with 1. Our launcher notices the end of
a child's process. If an external launcher (torchrun, SLURM) started the processes, the servers' coordinator reports
that a lease has run out. Then on each node, the first remaining process logs it and exits with 1.
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
from lightning_hetpipe.server.process.signals import TERMINATED, exit_now, handled

_LAST = -1_000_000
"""Lowest priority at exit of multiprocessing, whose own priorities are -100 to 10."""


class LostWorkers:
    """Virtual workers that this process knows to be lost. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.lost: dict[int, str] = {}
        """Descriptions of lost virtual workers, which the end of the run has still to name."""
        self._exits_with_one = False
        self._failed = 0
        self._is_watched = False
        self._earlier: BaseException | None = None

    def note(self, vw: int, who: str, how: str, sentence: str) -> None:
        """Record that virtual worker ``vw`` with the name ``who`` is lost. ``how`` it ended is a text such as "died by
        SIGKILL". ``sentence`` is logged now, unless empty."""
        with self._lock:
            if vw in self.lost or self._failed:
                return
            self.lost[vw] = f"{who}, which {how}"
        if sentence:
            say(sentence)

    def find(self, vw: int) -> None:
        """Record that virtual worker ``vw`` takes part again."""
        with self._lock:
            self.lost.pop(vw, None)

    def exit_with_one(self) -> None:
        """Let the program exit with 1 for another failure, which this process has logged and survived."""
        self._exits_with_one = True

    def name(self) -> None:
        """End a run: log the virtual workers without which it has gone on. The program exits with 1 because of them."""
        with self._lock:
            lost, self.lost = self.lost, {}
        if lost:
            self.exit_with_one()
            say(f"this run went on without {', '.join(lost[vw] for vw in sorted(lost))}")

    def forget(self, code: int = 1) -> None:
        """Forget all lost virtual workers, because the run has failed with an exception. Its exit code is ``code``."""
        with self._lock:
            self.lost.clear()
            self._exits_with_one, self._failed = False, code

    @property
    def uncaught(self) -> BaseException | None:
        """Exception that nobody has caught since the last run began, and that ends this program.

        Python stores the last printed exception before the functions at exit run. An exception from before the run
        belongs to an earlier cell of a notebook, or to a test runner. An interactive session goes on after exceptions.
        """
        last: BaseException | None = getattr(sys, "last_value", None)
        return None if not self._is_watched or last is self._earlier or hasattr(sys, "ps1") else last

    @property
    def status(self) -> int:
        """Exit code of this program, as far as its last run and its end determine it."""
        return self._failed or int(bool(self.lost) or self._exits_with_one or self.uncaught is not None)

    def watch(self) -> None:
        """Begin a run whose lost workers change the exit code. Call this before other functions are registered for the
        exit."""
        self._failed, self._earlier = 0, getattr(sys, "last_value", None)
        if not self._is_watched:
            self._is_watched = True
            atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        """Exit with 1, unless another failure in this process has its own exit code."""
        if (self.lost or self._exits_with_one) and not self._failed and self.uncaught is None:
            self.name()
            # Python has fixed its exit code by now. So exit in the last of multiprocessing's late finalizers.
            Finalize(None, exit_now, args=(1,), exitpriority=_LAST)


def went_on_without(who: str, how: str) -> str:
    """Return the sentence that ``who`` is lost because it was ``how``, and that the other virtual workers go on."""
    return f"{who} is lost: it was {how}; the others go on without it"


lost_workers = LostWorkers()
"""Lost virtual workers that this process knows of."""


# Ends that were asked for.

REASON = "told to end"
"""Reason that the other virtual workers receive if a virtual worker that was told to end leaves them."""


@contextmanager
def left_to_others() -> Iterator[None]:
    """Context manager in which, in the main thread, only a second SIGTERM ends this process, and SLURM's signals do
    not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)

    def told(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before)

    with handled({signal.SIGTERM: told, signal.SIGUSR1: signal.SIG_IGN, signal.SIGUSR2: signal.SIG_IGN}):
        yield


class ToldToEnd(SIGTERMException):
    """Error that ends a run which was told to end, once it is saved or may be left. With ``alone``, only this virtual
    worker leaves. Otherwise all virtual workers end, at a cut."""

    def __init__(self, alone: bool = False) -> None:
        super().__init__(TERMINATED)
        self.alone = alone
