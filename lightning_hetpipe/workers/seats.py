"""Seats of virtual workers in a fit: who takes part, who has come back, and what that one has to know."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_hetpipe.server.process.client import Client
from lightning_hetpipe.server.protocol.identifiers import CommitIndex
from lightning_hetpipe.server.protocol.messages import Departed
from lightning_hetpipe.server.transport.interface import Channel
from lightning_hetpipe.workers.coming_back import (
    AGAIN,
    CHUNK,
    READY,
    RECORD,
    SEATS,
    STATE,
    FitRecord,
    Returning,
    leave_parts,
    status_of,
    written,
)

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
        self._launch: Client | None = None  # of virtual worker 0, which receives those that come back
        self._session = ""
        self._coordinator: Channel
        self._lease = 0.0
        self._record = FitRecord()
        self._records, self._is_posted = True, False
        self._handed: list[str] = []
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
            self._launch, self._session, self._coordinator, self._lease = launch, session, coordinator, lease
        elif returns:
            self.returning = Returning(launch, self._index, self._size, lease, is_new)

    def close(self) -> None:
        """Delete what a process that comes back was given."""
        if self.returning is not None:
            self.returning.close()

    # Virtual worker 0's record.

    def note_fit(self, session: str, settings: Sequence[str], homes: Sequence[int]) -> None:
        """Note that a fit shares weights in ``session``."""
        self._record.session, self._record.settings, self._record.homes = session, list(settings), list(homes)

    def note_gather(self, what: str, values: list[Any]) -> None:
        """Note the values of a gather before the first epoch, which its call ``what`` is answered with.

        Tensors that virtual worker 0 gives to the others may be large, and are in the checkpoint.
        """
        if self._launch is not None and self._records and not what.startswith(EXCHANGE):
            self._record.gathers.append((what, values))

    def begin_epoch(self, gathers: int) -> None:
        """Let others come back from now on; ``gathers`` is the number of those in the session of the launch."""
        if self._launch is not None and self._records:
            self._records, self._is_posted = False, True
            self._record.ordinal = gathers
            leave_parts(self._launch, RECORD, written(vars(self._record)))

    def take_part(self) -> None:
        """Have this process, which has come back, gather with the others from now on."""
        self.close()
        self.returning = None

    def end_fit(self) -> None:
        """Let nobody come back any more: whoever does is told that the fit is over."""
        self.agreed = {}
        if self._launch is not None and self._is_posted:
            self._is_posted, self._record = False, FitRecord()
            leave_parts(self._launch, RECORD, written(vars(self._record)))
            self._launch.kept.leave(STATE, written({"over": True}))

    # Those that come back.

    def ready(self) -> dict[int, int]:
        """The virtual workers that are ready to come back, each with its incarnation in the session of the launch.

        Empty but on virtual worker 0.
        """
        if self._launch is None:
            return {}
        status = status_of(self._coordinator, self._session, self._lease)
        kept, members = status.get("kept", []), status.get("members", [])
        alive = {f"{READY}{each['vw']}-{each['incarnation']}": each for each in members}
        return {each["vw"]: each["incarnation"] for name, each in alive.items() if name in kept}

    def offer(self, vws: Mapping[int, int], checkpoint: Path, cut: int, check: Callable[[], None]) -> list[int]:
        """On virtual worker 0: give the state to ``vws``, and wait until they ask for seats; gives those that do.

        They are to become members at ``cut``. They are waited for one lease at most. With an empty ``checkpoint``, for
        which there may be no room, nobody gets anything.
        """
        if self._launch is None or not (size := checkpoint.stat().st_size):
            return []
        # By names of their own, as one that is slow may still fetch those of an earlier cut.
        self._handed = [f"{STATE}-{cut}-{part}" for part in range(-(-size // CHUNK))]
        for part, name in enumerate(self._handed):
            self._launch.kept.leave(name, partial(_chunk, checkpoint, part))
        state = {"vws": dict(vws), "cut": cut, "parts": self._handed, "agreed": self.agreed}
        self._launch.kept.leave(STATE, written(state))
        until, again = time.monotonic() + self._lease, threading.Event()
        while True:
            check()
            found = status_of(self._coordinator, self._record.session, self._lease).get("newcomers", [])
            here = [vw for vw in vws if vw in found]
            if len(here) == len(vws) or time.monotonic() > until:
                return here
            again.wait(AGAIN)

    def deal(self, taken: Sequence[int], cut: int) -> None:
        """Have ``taken`` be the seats from ``cut`` on."""
        self.taken = taken
        if self._launch is not None:
            self._launch.kept.leave(SEATS, written({"vws": list(taken), "cut": cut}))

    def settle(self, back: Sequence[int], asked: Mapping[int, int], members: CommitIndex) -> None:
        """Note that ``back`` have become members.

        Args:
            back: Those that have.
            asked: Those that were ready, each with its incarnation in the session of the launch.
            members: Members of the fit, with their incarnations there.
        """
        self._incarnations.update({(each.vw, True): each.incarnation for each in members.members if each.vw in back})
        self._incarnations.update({(vw, False): asked[vw] for vw in back})
        if self._launch is not None:
            ready = [f"{READY}{vw}-{incarnation}" for vw, incarnation in asked.items()]
            for name in (STATE, *self._handed, *ready):
                self._launch.kept.leave(name, None)

    def is_of_former(self, departed: Departed, of_fit: bool) -> bool:
        """Tell whether an earlier process has ended of one that has come back."""
        return departed.incarnation < self._incarnations.get((departed.vw, of_fit), 0)


def _chunk(path: Path, number: int) -> bytes:
    with path.open("rb") as file:
        file.seek(number * CHUNK)
        return file.read(CHUNK)
