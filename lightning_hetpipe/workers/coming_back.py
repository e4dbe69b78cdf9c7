"""Seats in a run, and coming to one: a process takes a seat when the next epoch begins, one lost or never taken.

The process runs the user's program from its start, and is *returning* until it has a seat in the fit: what it gathers
is answered from virtual worker 0's record of the same calls, and goes to nobody. Virtual worker 0 leaves two things
with the coordinator, in the session of the launch (``KeptContent``):

    record      when the first epoch of a fit begins: the results of all gathers until then
    state       when all have ended an epoch, for those that wait for it: a checkpoint of Lightning's

A returning process is let in to that session once the record is there, and waits for the state when Lightning loads the
checkpoint that it resumes from. Then it asks for its seat in the session of the fit. All others wait meanwhile, for one
lease at most. At the cut, those that have come agree with all others on who has a seat.
"""

from __future__ import annotations

import io
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_hetpipe.errors import SettingError, VirtualWorkerLost, say
from lightning_hetpipe.server.process.client import Client

if TYPE_CHECKING:
    from lightning_hetpipe.workers.join_handshake import JoinHandshake

RECORD, STATE = "record", "state"
OVER = b"over"
"""Left in the place of both once nobody can come back any more."""

EXCHANGE = "the exchange of"
"""Beginning of the names of gathers in which virtual worker 0 gives tensors to the others."""

_AGAIN = 0.1
"""Seconds between looks at the coordinator's status."""


class NamelessFile:
    """An empty file without a name, for code that wants a path; it goes with this process, however that ends."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="hetpipe-")  # noqa: SIM115

    @property
    def path(self) -> Path:
        """The path by which this process opens it."""
        return Path("/dev/fd", str(self._file.fileno()))

    def close(self) -> None:
        """Delete it."""
        self._file.close()


class CameTooLate(VirtualWorkerLost):
    """A returning process has no seat any more to come back to."""

    is_news = True

    def __init__(self, message: str) -> None:
        super().__init__(message, "it came back too late")


class SeatMissed(CameTooLate):
    """A returning process has no seat, as the others have gone on without it; a later one of it may get one."""

    may_return = True

    def __init__(self, lease: float) -> None:
        super().__init__(
            "it had no seat when they went on from the state that it had loaded; if that takes longer than its lease of"
            f" {lease:g} s, raise WSPCallback(lease=...)"
        )


def too_late(index: int) -> CameTooLate:
    """The error of virtual worker ``index``, where there is no training any more to take part in."""
    return CameTooLate(
        f"virtual worker {index} comes back to a run whose training is over, or that of its first fit, to which"
        " alone one can come back; start all of them anew for another"
    )


@dataclass
class FitRecord:
    """Virtual worker 0's record of a fit until its first epoch begins.

    Attributes:
        session: Name of the fit's session.
        settings: Settings that all have agreed on, as "name=value".
        homes: Server of each parameter, for ``placement="local"``; empty where none was chosen.
        gathers_made: Number of the last gather in the session of the launch.
        gathers: For each gather, its call and everyone's values.
    """

    session: str = ""
    settings: list[str] = field(default_factory=list)
    homes: list[int] = field(default_factory=list)
    gathers_made: int = 0
    gathers: list[tuple[str, list[Any]]] = field(default_factory=list)


class Returning:
    """This process, while it comes back as virtual worker ``index`` and has no seat in the fit.

    Args:
        launch: Its client in the session of the launch.
        size: N.
        lease: Seconds that the others wait for it.
        is_new: Whether it is the first process that has this seat.
    """

    def __init__(self, launch: Client, index: int, size: int, lease: float, is_new: bool = False) -> None:
        self._launch, self._index, self._size, self._lease = launch, index, size, lease
        comes = "comes" if is_new else "comes back"
        say(f"virtual worker {index} {comes} to a run that goes on, and takes part from its next epoch on")
        content = self._recalled(RECORD)
        self.record = FitRecord(**torch.load(io.BytesIO(content), weights_only=True))
        self._next = 0
        self._file: NamelessFile | None = None
        self._has_state = False

    def answer(self, what: str) -> list[Any]:
        """Everyone's values in the next gather of the record whose call is ``what``.

        Raises:
            SettingError: if the others have made no such call before their first epoch.
        """
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
        """Check that this process comes to ``session`` with the ``settings`` of the others, but for shares.

        Raises:
            CameTooLate: if that is another fit of the program.
            SettingError: if settings differ.
        """
        if session != self.record.session and not self.record.homes:
            raise CameTooLate(
                f"virtual worker {self._index} comes back to a later fit of the program ({self.record.session}), whose"
                " beginning it has not seen; only to the first fit of a program one can come back"
            )
        for mine, theirs in zip(settings, self.record.settings, strict=True):
            if mine != theirs and not mine.startswith("shares="):  # they may have changed since
                raise SettingError(
                    f"virtual worker {self._index} comes back with {mine} to a run that has {theirs}; start it with the"
                    " settings of the others"
                )

    @property
    def checkpoint(self) -> Path:
        """The checkpoint to resume from, which is there after :meth:`await_state`."""
        self._file = self._file or NamelessFile()
        return self._file.path

    def await_state(self) -> None:
        """Wait until the others have ended an epoch, and get the checkpoint.

        Raises:
            CameTooLate: if training is over.
        """
        if not self._has_state:
            self.checkpoint.write_bytes(self._recalled(STATE))
            self._has_state = True

    def _recalled(self, name: str) -> bytearray:
        if (content := self._launch.kept.recall(name)) == OVER:
            raise too_late(self._index)
        return content

    def missed(self) -> SeatMissed:
        """The error of a process that has no seat where it asked for one."""
        return SeatMissed(self._lease)

    def close(self) -> None:
        """Delete the checkpoint."""
        if self._file is not None:
            self._file.close()


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
        self._handshake: JoinHandshake
        self._record = FitRecord()
        self._records, self._is_posted = True, False

    def open(self, launch: Client, session: str, handshake: JoinHandshake) -> None:
        """Begin with the ``session`` of the launch, to which ``handshake`` has led the client ``launch``."""
        if self._index == 0:
            self._launch, self._session, self._handshake = launch, session, handshake
        elif handshake.returns:
            lease, is_new = handshake.settings.lease, handshake.is_new
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

    def begin_epoch(self) -> None:
        """Let others come back from now on."""
        if self._launch is not None and self._records:
            self._records, self._is_posted = False, True
            self._record.gathers_made = self._launch.gathers
            written = io.BytesIO()
            torch.save(vars(self._record), written)
            self._launch.kept.leave(RECORD, written.getvalue())

    def take_part(self) -> None:
        """Have this process, which has come back, gather with the others from now on."""
        self.close()
        self.returning = None

    def end_fit(self) -> None:
        """Let nobody come back any more: whoever does is told that the fit is over."""
        self.agreed = {}
        if self._launch is not None and self._is_posted:
            self._is_posted, self._record = False, FitRecord()
            for name in (RECORD, STATE):
                self._launch.kept.leave(name, OVER)

    # Those that come back.

    def ready(self) -> dict[int, int]:
        """The virtual workers that are ready to come back, each with its incarnation.

        Empty but on virtual worker 0.
        """
        if self._launch is None:
            return {}
        status = self._handshake.status_of(self._session)
        asked, members = status.get("asked", {}), status.get("members", [])
        return {each["vw"]: each["incarnation"] for each in members if asked.get(str(each["vw"])) == STATE}

    def offer(self, vws: Mapping[int, int], checkpoint: Path, check: Callable[[], None]) -> None:
        """On virtual worker 0: give the state to ``vws``, and wait until all of them ask for seats.

        Each is given with its incarnation, as a later process of it waits for another cut. They are waited for one
        lease at most. With an empty ``checkpoint``, for which there may be no room, nobody gets anything.
        """
        if self._launch is None or not checkpoint.stat().st_size:
            return
        self._launch.kept.leave(STATE, checkpoint, readers=vws.values())
        until, again = time.monotonic() + self._handshake.settings.lease, threading.Event()
        while time.monotonic() < until:
            check()
            if {*vws} <= {*self._handshake.status_of(self._record.session).get("newcomers", [])}:
                break
            again.wait(_AGAIN)

    def withdraw(self) -> None:
        """On virtual worker 0: end what :meth:`offer` offers."""
        if self._launch is not None:
            self._launch.kept.leave(STATE, None)
