"""The virtual workers that a run has lost and gone on without: each is named, and the program exits with 1.

However the processes were started: by our launcher, which sees a child's process end, or by torchrun, SLURM and the
like, where the servers' coordinator says that a lease has run out. Whoever comes first says it. Of each node, one
process speaks and exits so: the first that is left.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from multiprocessing.util import Finalize

from lightning_hetpipe.launch.uncaught import Uncaught

_LAST = -1_000_000
"""Of multiprocessing's priorities, whose own are -100 to 10."""


def say(sentence: str) -> None:
    """A sentence for the person at the terminal."""
    with contextlib.suppress(OSError):
        print(f"hetpipe: {sentence}.", file=sys.stderr, flush=True)


class Losses:
    """What one process knows of the virtual workers that are lost. Calls may come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[int] = set()
        self._untold: dict[int, str] = {}
        """Those that the end of the run names, in words."""
        self._exits = False
        self._failed = False
        self._uncaught: Uncaught | None = None

    def note(self, vw: int, who: str, how: str, said: str) -> None:
        """Virtual worker ``vw`` is lost.

        Args:
            who: Names it.
            how: Continues "which", such as "died by SIGKILL".
            said: A sentence about it, for now; nothing where it was said.
        """
        with self._lock:
            if vw in self._known or self._failed:
                return
            self._known.add(vw)
            self._exits = True
            self._untold[vw] = f"{who}, which {how}"
        if said:
            say(said)

    def exit_with_one(self) -> None:
        """Another failure that this process has gone on from, and has told of."""
        self._exits = True

    def name(self) -> None:
        """Ends a run: names those that it has gone on without. What comes later is another run."""
        with self._lock:
            untold, self._untold = self._untold, {}
            self._known.clear()
        if untold:
            say(f"this run went on without {', '.join(untold[vw] for vw in sorted(untold))}")

    def forget(self) -> None:
        """The run has failed. An exception has told the program, which has an exit code for it."""
        with self._lock:
            self._known.clear()
            self._untold.clear()
            self._exits, self._failed = False, True

    def watch(self) -> None:
        """A run begins, and the exit code tells of its losses; to be called before what else is to be done at exit."""
        self._failed = False
        if self._uncaught is None:
            self._uncaught = Uncaught()
            atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        """Where something has failed in this process, too, it has an exit code for that."""
        if self._exits and not self._failed and self._uncaught is not None and self._uncaught.error is None:
            self.name()
            # Python has its exit code by now. What multiprocessing does at exit comes late, and its last is this.
            Finalize(None, _exit, args=(1,), exitpriority=_LAST)


losses = Losses()
"""This process's."""


def _exit(code: int) -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads it
            stream.flush()
    os._exit(code)
