"""Seats of virtual workers in a run: how they are lost, and taken by another process.

A virtual worker hears of departures from coordinators. At the beginning of an epoch, a process takes a lost seat or a
seat never taken.

The process runs the user's program from its start. It is *returning* until it has a seat in the fit: virtual worker 0's
record answers its gathers, which reach nobody. Virtual worker 0 leaves two things with the coordinator, in the session
of the launch (``KeptContent``):

    record      when the first epoch of a fit begins: the results of all gathers until then
    state       when all have ended an epoch, for waiting processes: a checkpoint of Lightning's

A returning process enters that session once the record is there. It waits for the state when Lightning loads the
checkpoint from which it resumes. Then it asks for its seat in the session of the fit, while the other virtual workers
wait for one lease at most. At the cut, all agree on who has a seat.
"""

from __future__ import annotations

import io
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from lightning_hetpipe.errors import SettingError, VirtualWorkerLost, say
from lightning_hetpipe.server.process.client import Client
from lightning_hetpipe.server.protocol.messages import Departed, Lost

if TYPE_CHECKING:
    from lightning_hetpipe.workers.join_handshake import JoinHandshake

RECORD, STATE = "record", "state"
OVER = b"over"
"""Replacement for record and state once no virtual worker can come back any more."""

EXCHANGE = "the exchange of"
"""Beginning of the names of gathers in which virtual worker 0 gives tensors to the other virtual workers."""

_AGAIN = 0.1
"""Seconds between requests for the coordinator's status."""


class Departures:
    """Virtual workers that virtual worker ``index`` knows to be lost. Any thread may call it.

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


def nameless_file() -> tuple[IO[bytes], Path]:
    """Make an empty file without a name, which vanishes when it is closed or this process ends, however that happens.
    Return the file, and the path by which this process opens it."""
    file = tempfile.TemporaryFile(prefix="hetpipe-")  # noqa: SIM115
    return file, Path("/dev/fd", str(file.fileno()))


class CameTooLate(VirtualWorkerLost):
    """Error that a returning process has no seat any more to which it can come back."""

    is_news = True

    def __init__(self, message: str) -> None:
        super().__init__(message, "it came back too late")


class SeatMissed(CameTooLate):
    """Error that the other virtual workers have gone on before a returning process had a seat. A later process of it
    may get a seat."""

    may_return = True

    def __init__(self, lease: float) -> None:
        super().__init__(
            "it had no seat when they went on from the state that it had loaded; if that takes longer than its lease of"
            f" {lease:g} s, raise WSPCallback(lease=...)"
        )


def too_late(index: int) -> CameTooLate:
    """Make the error of virtual worker ``index`` if there is no training any more in which it could take part."""
    return CameTooLate(
        f"virtual worker {index} comes back to a run whose training is over, or that of its first fit, to which"
        " alone one can come back; start all of them anew for another"
    )


@dataclass
class FitRecord:
    """Virtual worker 0's record of a fit until its first epoch begins.

    Attributes:
        settings: Settings on which all have agreed, as "name=value".
        homes: Server of each parameter for ``placement="local"``, or empty.
        gathers_made: Number of the last gather in the session of the launch.
        gathers: For each gather, its call and the values of all.
    """

    session: str = ""
    settings: list[str] = field(default_factory=list)
    homes: list[int] = field(default_factory=list)
    gathers_made: int = 0
    gathers: list[tuple[str, list[Any]]] = field(default_factory=list)


class Returning:
    """This process while it comes back as virtual worker ``index`` and has no seat in the fit. ``launch`` is its client
    in the session of the launch. ``is_new`` is True for the first process with this seat."""

    def __init__(self, launch: Client, index: int, size: int, is_new: bool) -> None:
        self._launch, self._index, self._size = launch, index, size
        comes = "comes" if is_new else "comes back"
        say(f"virtual worker {index} {comes} to a run that goes on, and takes part from its next epoch on")
        content = self._recalled(RECORD)
        self.record = FitRecord(**torch.load(io.BytesIO(content), weights_only=True))
        self._next = 0
        self.file, self.checkpoint = nameless_file()
        """Checkpoint to resume from, complete after :meth:`await_state`."""
        self._has_state = False

    def answer(self, what: str) -> list[Any]:
        """Return all values of the next recorded gather with the call ``what``. Raise SettingError if the record has
        none."""
        if what.startswith("strategy.barrier"):
            return [None] * self._size
        for place in range(self._next, len(self.record.gathers)):
            if self.record.gathers[place][0] == what:
                self._next = place + 1
                return self.record.gathers[place][1]
        raise SettingError(
            f"virtual worker {self._index} comes back, and calls {what} before it takes part, which the others have not"
            " done before their first epoch; leave restarts out, or make the call on all of them, or in a later hook"
        )

    def check(self, session: str, settings: Sequence[str]) -> None:
        """Check that this process comes to ``session`` with the record's ``settings``, except shares.

        Raises:
            CameTooLate: if this is another fit of the program.
            SettingError: if settings differ.
        """
        if session != self.record.session and not self.record.homes:
            raise CameTooLate(
                f"virtual worker {self._index} comes back to a later fit of the program ({self.record.session}), whose"
                " beginning it has not seen; only to the first fit of a program one can come back"
            )
        for mine, theirs in zip(settings, self.record.settings, strict=True):
            if mine != theirs and not mine.startswith("shares="):  # shares may have changed since
                raise SettingError(
                    f"virtual worker {self._index} comes back with {mine} to a run that has {theirs}; start it with the"
                    " settings of the others"
                )

    def await_state(self) -> None:
        """Wait until the other virtual workers have ended an epoch, and get the checkpoint. Raise CameTooLate after
        training."""
        if not self._has_state:
            self.checkpoint.write_bytes(self._recalled(STATE))
            self._has_state = True

    def _recalled(self, name: str) -> bytearray:
        if (content := self._launch.kept.recall(name)) == OVER:
            raise too_late(self._index)
        return content


class Seats:
    """Seats of ``size`` virtual workers, as virtual worker ``index`` knows them.

    Attributes:
        taken: Virtual workers that take part, as all knew it when the last epoch ended or began.
        returning: This process while it comes back to a run. Its gathers reach no other virtual worker.
        agreed: Results of agreements in the present fit, by call.
    """

    def __init__(self, index: int, size: int) -> None:
        self._index, self._size = index, size
        self.taken: Sequence[int] = range(size)
        self.returning: Returning | None = None
        self.agreed: dict[str, list[Any]] = {}
        self._launch: Client | None = None  # only on virtual worker 0, which receives returning processes
        self._session = ""
        self._handshake: JoinHandshake
        self._record = FitRecord()
        self._records, self._is_posted = True, False

    def open(self, launch: Client, session: str, handshake: JoinHandshake) -> None:
        """Begin with the ``session`` of the launch, which the client ``launch`` has entered by ``handshake``."""
        if self._index == 0:
            self._launch, self._session, self._handshake = launch, session, handshake
        elif handshake.returns:
            self.returning = Returning(launch, self._index, self._size, handshake.is_new)

    def close(self) -> None:
        """Delete the checkpoint of a process that comes back."""
        if self.returning is not None:
            self.returning.file.close()

    # Virtual worker 0's record.

    def note_fit(self, session: str, settings: Sequence[str], homes: Sequence[int]) -> None:
        """Record that a fit shares weights in ``session``."""
        self._record.session, self._record.settings, self._record.homes = session, list(settings), list(homes)

    def note_gather(self, what: str, values: list[Any]) -> None:
        """Record the values of a gather before the first epoch. They answer the call ``what`` of processes that come
        back. Tensors from virtual worker 0 are left out. They may be large, and the checkpoint has them."""
        if self._launch is not None and self._records and not what.startswith(EXCHANGE):
            self._record.gathers.append((what, values))

    def begin_epoch(self) -> None:
        """Let processes come back from now on."""
        if self._launch is not None and self._records:
            self._records, self._is_posted = False, True
            self._record.gathers_made = self._launch.gathers
            written = io.BytesIO()
            torch.save(vars(self._record), written)
            self._launch.kept.leave(RECORD, written.getvalue())

    def take_part(self) -> None:
        """Let this process, which has come back, gather with the other virtual workers from now on."""
        self.close()
        self.returning = None

    def end_fit(self) -> None:
        """Let no process come back any more. A later process hears that the fit is over."""
        self.agreed = {}
        if self._launch is not None and self._is_posted:
            self._is_posted, self._record = False, FitRecord()
            for name in (RECORD, STATE):
                self._launch.kept.leave(name, OVER)

    # Processes that come back.

    def ready(self) -> dict[int, int]:
        """Return the virtual workers that are ready to come back, with their incarnations. Only virtual worker 0 knows
        them."""
        if self._launch is None:
            return {}
        status = self._handshake.status_of(self._session)
        asked, members = status.get("asked", {}), status.get("members", [])
        return {each["vw"]: each["incarnation"] for each in members if asked.get(str(each["vw"])) == STATE}

    def offer(self, vws: Mapping[int, int], checkpoint: Path, check: Callable[[], None]) -> None:
        """Give ``vws`` the state, on virtual worker 0, and wait for one lease at most until all of them ask for seats.
        ``vws`` have incarnations, because a later process of a virtual worker waits for another cut. An empty
        ``checkpoint``, left by a full disk, is not given."""
        if self._launch is None or not checkpoint.stat().st_size:
            return
        self._launch.kept.leave(STATE, checkpoint, readers=vws.values())
        until, again = time.monotonic() + self._handshake.launch.wsp.lease, threading.Event()
        while time.monotonic() < until:
            check()
            if {*vws} <= {*self._handshake.status_of(self._record.session).get("newcomers", [])}:
                break
            again.wait(_AGAIN)

    def withdraw(self) -> None:
        """End the offer of :meth:`offer`, on virtual worker 0."""
        if self._launch is not None:
            self._launch.kept.leave(STATE, None)
