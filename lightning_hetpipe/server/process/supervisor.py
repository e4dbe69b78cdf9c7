"""Restarts of a server whose process dies: the virtual workers hold all that it held (law L5)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from lightning_hetpipe.server.process.server_process import ServerProcess, how

STARTS = 5
"""Restarts within `WINDOW` seconds after which a server is given up."""

WINDOW = 300.0
"""Seconds after which an end does not count any more."""

_LOOK = 0.2  # seconds between checks of the process


class ServerLost(RuntimeError):
    """The server has ended and restarts have failed; the message says how it ended."""


def pause(ends: Sequence[float], now: float) -> float | None:
    """Seconds to wait before a restart: none at first, and longer each time; None: give up.

    Args:
        ends: times at which it ended, or could not be started, the last one included.
        now: on the same clock.
    """
    recent = sum(now - end < WINDOW for end in ends)
    if recent > STARTS:
        return None
    return 0.0 if recent < 2 else 0.5 * 2.0 ** (recent - 2)


class Supervisor:
    """Keep ``server`` running between entering and leaving the context, from a thread of its own.

    Args:
        server: not started yet; keeps its address.
        say: receives a sentence after each restart.
        lost: called once if the server is given up.
        pause: as the function of that name.
    """

    def __init__(
        self,
        server: ServerProcess,
        say: Callable[[str], None],
        lost: Callable[[ServerLost], None],
        pause: Callable[[Sequence[float], float], float | None] = pause,
    ) -> None:
        self.server = server
        self._say = say
        self._lost = lost
        self._pause = pause
        self._ends: list[float] = []
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and return when it serves. Raises as `ServerProcess.start` does."""
        self.server.start()
        self._thread = threading.Thread(target=self._watch, name="hetpipe-supervisor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the server, also during a restart. May be called again."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
        self.server.stop()

    def _watch(self) -> None:
        while not self._ending.wait(_LOOK):
            if (code := self.server.code) is not None and not self._start_again(how(code)):
                return

    def _start_again(self, what: str) -> bool:
        """Restart the server after ``what`` has happened to it; return whether it serves again."""
        first = what
        while True:
            now = time.monotonic()
            self._ends.append(now)
            rest = self._pause(self._ends, now)
            if rest is None:
                times = f"{len(self._ends)} times" if len(self._ends) > 1 else "once"
                self._lost(ServerLost(f"the parameter server at {self.server.address} has failed {times}: it {what}"))
                return False
            if self._ending.wait(rest):
                return False
            try:
                self.server.start(self._ending)
            except Exception as error:
                if self._ending.is_set():
                    return False
                what = f"could not be started again ({str(error).rstrip('.')})"
                continue
            self._say(
                f"the parameter server {first} and was started again; training goes on from what the virtual workers"
                " hold"
            )
            return True
