"""Leases: a VW is alive if it was heard within its lease. Pure: time is an argument.

If no message arrives from anyone, all VWs were stopped (Ctrl-Z), or the server was: VWs are heard three times in a
lease, so at most half a lease of that time counts. After `FORGOTTEN` leases of such a silence all leases end.
"""

from __future__ import annotations

FORGOTTEN = 10
"""Leases of silence of all VWs after which they are taken for dead."""


class Leases:
    """
    Args:
        seconds: of silence after which a VW is left out.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.seen: dict[int, float] = {}
        """By VW that is alive, the time at which it was last heard."""
        self._heard: float | None = None
        """The time at which any VW was last heard."""

    def hear(self, now: float) -> float:
        """Note that a VW is heard; return the seconds before that do not count."""
        excess = 0.0 if self._heard is None else max(0.0, now - self._heard - self.seconds / 2)
        self._heard = now
        self.seen = {vw: seen + excess for vw, seen in self.seen.items()}
        return excess

    def expired(self, now: float) -> list[int]:
        """VWs whose leases have run out."""
        silence = 0.0 if self._heard is None else now - self._heard
        if self.seconds / 2 < silence <= FORGOTTEN * self.seconds:
            return []
        return [vw for vw, seen in self.seen.items() if now - seen > self.seconds]

    def ends(self) -> list[float]:
        """Times at which leases run out if nobody is heard until then."""
        return [seen + self.seconds for seen in self.seen.values()]
