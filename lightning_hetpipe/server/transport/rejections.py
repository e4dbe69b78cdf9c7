"""A server's own words about whom it turned away: few lines, and nothing in them that commands a terminal."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from urllib.parse import unquote

EVERY = 60.0
"""Seconds in which the same is said once."""

MOST = 10
"""Lines in that time, whoever comes."""

LONGEST = 300
"""Characters of a peer's that a line repeats."""

_LOG = logging.getLogger(__name__)


class Rejections:
    """Says who was turned away and why, through ``say``; from any thread.

    Args:
        say: Takes a sentence.
        now: The time, in seconds of any origin.
    """

    def __init__(self, say: Callable[[str], None] = _LOG.warning, now: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._now = now
        self._lock = threading.Lock()
        self._began = float("-inf")
        self._said: set[tuple[str, str]] = set()
        self._unsaid = 0

    def note(self, peer: str, why: str) -> None:
        """Says that ``peer``, as gRPC writes it, was turned away, unless that has been said, or too much has."""
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
        self._say(f"hetpipe server: turned away {what[0]}: {what[1]}{more}")


def host_of(peer: str) -> str:
    """The host of a peer that gRPC calls ipv4:10.0.0.1:4711 or ipv6:%5B::1%5D:4711."""
    return printable(unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]") or peer)


def printable(text: str) -> str:
    """The beginning of ``text``, from anywhere, as one line that commands no terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:LONGEST])
