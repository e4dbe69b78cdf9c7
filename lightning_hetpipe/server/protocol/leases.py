"""Who is alive: who was heard within a lease. Pure: time is an argument.

A silence of all is held against nobody, as then all were stopped (Ctrl-Z), or the server was: VWs that live are heard
thrice in a lease, so of a silence of all no more than half a lease counts. Only after `FORGOTTEN` leases nobody is
expected any more.
"""

from __future__ import annotations

FORGOTTEN = 10
"""Leases after which it is taken that a silence of all will not end."""


class Leases:
    """
    Args:
        seconds: of silence after which a VW is left out.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.seen: dict[int, float] = {}
        """When each VW that is alive was last heard."""
        self._heard: float | None = None
        """When anybody was."""

    def hear(self, now: float) -> float:
        """Somebody is heard; returns the seconds before that do not count."""
        excess = 0.0 if self._heard is None else max(0.0, now - self._heard - self.seconds / 2)
        self._heard = now
        self.seen = {vw: seen + excess for vw, seen in self.seen.items()}
        return excess

    def expired(self, now: float) -> list[int]:
        """The VWs whose leases have run out."""
        silence = 0.0 if self._heard is None else now - self._heard
        if self.seconds / 2 < silence <= FORGOTTEN * self.seconds:
            return []
        return [vw for vw, seen in self.seen.items() if now - seen > self.seconds]

    def ends(self) -> list[float]:
        """When leases run out, if nothing is heard until then."""
        return [seen + self.seconds for seen in self.seen.values()]
