"""Log lines about callers that a server has turned away: few, and safe to print on a terminal."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from urllib.parse import unquote

EVERY = 60.0
"""Seconds within which a line is not repeated."""

MOST = 10
"""Largest number of lines within `EVERY` seconds."""

LONGEST = 300
"""Largest number of a peer's characters in a line."""

_LOG = logging.getLogger(__name__)


class Rejections:
    """Log of callers that were turned away, for any thread. ``say`` receives lines that begin with ``program``."""

    def __init__(
        self,
        say: Callable[[str], None] = _LOG.warning,
        now: Callable[[], float] = time.monotonic,
        program: str = "hetpipe server",
    ) -> None:
        self._say = say
        self._program = program
        self._now = now
        self._lock = threading.Lock()
        self._began = float("-inf")
        self._said: set[tuple[str, str]] = set()
        self._unsaid = 0

    def note(self, peer: str, why: str) -> None:
        """Log that ``peer``, in gRPC's notation, was turned away, unless this was just logged or lines are too many."""
        what = (host_of(peer), printable(why))
        with self._lock:
            unsaid = 0
            if (now := self._now()) - self._began >= EVERY:
                self._began, self._said, unsaid, self._unsaid = now, set(), self._unsaid, 0
            if what in self._said or len(self._said) >= MOST:
                self._unsaid += 1
                return
            self._said.add(what)
        more = f" (since the last such line {unsaid} more were)" if unsaid else ""
        self._say(f"{self._program}: turned away {what[0]}: {what[1]}{more}")


def host_of(peer: str) -> str:
    """Return the host of a peer, which gRPC writes as ipv4:10.0.0.1:4711 or ipv6:%5B::1%5D:4711."""
    return printable(unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]") or peer)


def printable(text: str) -> str:
    """Return the beginning of untrusted ``text`` as one line without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:LONGEST])
