"""Seats of virtual workers in a fit: who takes part, who has come back, and what that one has to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_hetpipe.server.process.client import Client
from lightning_hetpipe.server.protocol.identifiers import CommitIndex
from lightning_hetpipe.server.protocol.messages import Departed
from lightning_hetpipe.server.transport.interface import Channel
from lightning_hetpipe.workers.coming_back import Reception, Returning

EXCHANGE = "the exchange of"
"""Beginning of the names of gathers in which virtual worker 0 gives tensors to the others."""


class Seats:
    """Seats of ``size`` virtual workers, as virtual worker ``index`` knows them.

    Attributes:
        taken: The virtual workers that take part, as all knew it when the last epoch ended or began.
        returning: This process, while it comes back to a run that goes on; its gathers go to nobody.
        agreed: What all have agreed on once in the fit that runs, by call.
    """

    def __init__(self, index: int, size: int) -> None:
        self._index, self._size = index, size
        self.taken: Sequence[int] = range(size)
        self.returning: Returning | None = None
        self.agreed: dict[str, list[Any]] = {}
        self._reception: Reception | None = None
        self._records = True
        self._incarnations: dict[tuple[int, bool], int] = {}

    def open(
        self, launch: Client, session: str, coordinator: Channel, lease: float, returns: bool, is_new: bool = False
    ) -> None:
        """Begin with the ``session`` of the launch, whose client is ``launch``.

        Args:
            coordinator: Channel to the coordinator.
            lease: Seconds that the others wait for one that comes back.
            returns: Whether this process comes when the others are there.
            is_new: Whether it is the first one that has its seat.
        """
        if self._index == 0:
            self._reception = Reception(launch, session, coordinator, lease)
        elif returns:
            self.returning = Returning(launch, self._index, self._size, lease, is_new)

    def close(self) -> None:
        """Delete what a process that comes back was given."""
        if self.returning is not None:
            self.returning.close()

    # Virtual worker 0's record.

    def note_fit(self, session: str, settings: Sequence[str], homes: Sequence[int]) -> None:
        """Note that a fit shares weights in ``session``."""
        if self._reception is not None:
            record = self._reception.record
            record.session, record.settings, record.homes = session, list(settings), list(homes)

    def note_gather(self, what: str, values: list[Any]) -> None:
        """Note the values of a gather before the first epoch, which its call ``what`` is answered with.

        Tensors that virtual worker 0 gives to the others may be large, and are in the checkpoint.
        """
        if self._reception is not None and self._records and not what.startswith(EXCHANGE):
            self._reception.record.gathers.append((what, values))

    def begin_epoch(self, gathers: int) -> None:
        """Let others come back from now on; ``gathers`` is the number of those in the session of the launch."""
        if self._reception is not None and self._records:
            self._records = False
            self._reception.record.ordinal = gathers
            self._reception.post()

    def take_part(self) -> None:
        """Have this process, which has come back, gather with the others from now on."""
        self.close()
        self.returning = None

    def end_fit(self) -> None:
        """Let nobody come back any more."""
        self.agreed = {}
        if self._reception is not None:
            self._reception.shut()

    # Those that come back.

    def ready(self) -> dict[int, int]:
        """The virtual workers that are ready to come back, each with its incarnation; nothing but on the first one."""
        return {} if self._reception is None else self._reception.ready()

    def offer(self, vws: Mapping[int, int], checkpoint: Path, cut: int, check: Callable[[], None]) -> list[int]:
        """On virtual worker 0: give the state to ``vws``, and wait until they ask for seats; gives those that do.

        With an empty ``checkpoint``, for which there may be no room, nobody gets anything.
        """
        if self._reception is None or not checkpoint.stat().st_size:
            return []
        self._reception.hand_over(checkpoint, vws, cut, self.agreed)
        return self._reception.await_askers([*vws], check)

    def deal(self, taken: Sequence[int], cut: int) -> None:
        """Have ``taken`` be the seats from ``cut`` on."""
        self.taken = taken
        if self._reception is not None:
            self._reception.seat(taken, cut)

    def settle(self, back: Sequence[int], asked: Mapping[int, int], members: CommitIndex) -> None:
        """Note that ``back`` have become members.

        Args:
            back: Those that have.
            asked: Those that were ready, each with its incarnation in the session of the launch.
            members: Members of the fit, with their incarnations there.
        """
        self._incarnations.update({(each.vw, True): each.incarnation for each in members.members if each.vw in back})
        self._incarnations.update({(vw, False): asked[vw] for vw in back})
        if self._reception is not None:
            self._reception.clear(asked)

    def is_of_former(self, departed: Departed, of_fit: bool) -> bool:
        """Tell whether an earlier process has ended of one that has come back."""
        return departed.incarnation < self._incarnations.get((departed.vw, of_fit), 0)
