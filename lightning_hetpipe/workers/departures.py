"""Departures of virtual workers, as a virtual worker hears of them from coordinators, in any thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from lightning_hetpipe.errors import say
from lightning_hetpipe.server.protocol.messages import Departed, Lost


class Departures:
    """Virtual workers that virtual worker ``index`` knows to be lost.

    Args:
        place: Its node as text, or empty for a single node.
        on_loss: Called for each lost virtual worker as ``LostWorkers.note`` is, in the first remaining process of a
            node.

    Attributes:
        places: Nodes of all known virtual workers.
        has_told: True if ``on_loss`` was called here.
    """

    def __init__(self, index: int, place: str, on_loss: Callable[[int, str, str, str], None]) -> None:
        self._index, self._on_loss = index, on_loss
        self.places = {index: place}
        self.lost: set[int] = set()
        self.has_told = False
        self._newest: dict[int, int] = {}  # incarnations of virtual workers that are there again
        self._clocks: dict[int, int] = {}

    def note(self, departed: Departed, of_fit: bool, in_fit: bool, is_told: bool = True) -> str | None:
        """Record and report a departure. Return the sentence about it, or None if there is nothing to do now.

        Args:
            of_fit: Whether the session of a fit reports it.
            in_fit: Whether there is a fit, whose session reports it as well, with the number of waves.
            is_told: Whether it is news, to report here.
        """
        vw, why = departed.vw, departed.why
        if vw in self.lost or (in_fit and not of_fit):
            return None
        self.lost.add(vw)
        if of_fit:
            self._clocks[vw] = departed.clock
        who = self._named(vw)
        what = f"{who} is lost{f' after {departed.clock} waves' if of_fit else ''}: it was {why}"
        if is_told and self._speaks(self.lost):
            self.has_told = True
            self._on_loss(vw, who, f"was {why}", what if vw == 0 else f"{what}; the others go on without it")
        return what

    def newly(self) -> dict[int, int]:
        """Return the virtual workers that the present fit has lost since the last call, with their clocks."""
        return {vw: self._clocks.pop(vw) for vw in [*self._clocks]}

    def find(self, back: Mapping[int, int]) -> None:
        """Record that the virtual workers ``back`` are there again, with their incarnations."""
        self._newest.update(back)
        self.lost -= back.keys()

    def is_of_former(self, departed: Departed) -> bool:
        """Return True for the end of an earlier process of a virtual worker that is there again."""
        return departed.incarnation < self._newest.get(departed.vw, 0)

    def tell_of_updates(self, lost: Lost) -> None:
        """Log which updates died with a virtual worker and the servers that had them (law L5)."""
        if not self._speaks({*self.lost, lost.vw}):
            return
        who, first = self._named(lost.vw), lost.first
        if lost.last < 0:
            say(f"what {who} had pushed from wave {first} on, if anything, is lost: only the lost server knew of it")
        else:
            waves = f"wave {first}" if first == lost.last else f"waves {first} to {lost.last}"
            say(f"the updates of {who} from {waves} are lost: only it and the lost server had them")

    def _named(self, vw: int) -> str:
        return f"virtual worker {vw}" + (f" ({self.places[vw]})" if self.places.get(vw) else "")

    def _speaks(self, gone: Collection[int]) -> bool:
        """Return True if this is the first virtual worker of its node that is not ``gone``."""
        here = [i for i, place in self.places.items() if place == self.places[self._index] and i not in gone]
        return self._index == min(here)
