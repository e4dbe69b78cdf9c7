"""A server that is started again when its process dies: what it held, the virtual workers hold as well (law L5)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from lightning_hetpipe.server.process.server_process import ServerProcess, how

STARTS = 5
"""So often a server is started again within `WINDOW`, and not once more: something ends it each time."""

WINDOW = 300.0
"""Seconds after which an end is forgotten."""

_LOOK = 0.2  # seconds between looks at the process


class ServerLost(RuntimeError):
    """The server has ended, and starting it again did not help; the message says how it ended."""


def pause(ends: Sequence[float], now: float) -> float | None:
    """Seconds to wait before a server is started again: none at first, and each time longer; None: not again.

    Args:
        ends: When it ended, or could not be started, the last time included.
        now: In the same seconds.
    """
    recent = sum(now - end < WINDOW for end in ends)
    if recent > STARTS:
        return None
    return 0.0 if recent < 2 else 0.5 * 2.0 ** (recent - 2)


class Supervisor:
    """Keeps ``server`` running between entering and leaving the context, from a thread of its own.

    Args:
        server: Not started yet. It keeps its address.
        say: Told, in one sentence, each time that it was started again.
        lost: Told once, if it is not started again any more.
        pause: As the function of that name.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the server and returns when it serves. Raises as `ServerProcess.start` does."""
        self.server.start()
        self._thread = threading.Thread(target=self._watch, name="hetpipe-supervisor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the server, also where it is just being started again. May be called again."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
        self.server.stop()

    def _watch(self) -> None:
        while not self._ending.wait(_LOOK):
            if (code := self.server.code) is not None and not self._start_again(how(code)):
                return

    def _start_again(self, what: str) -> bool:
        """Whether it serves again; ``what`` has happened to it."""
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
