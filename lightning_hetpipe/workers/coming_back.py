"""Seats in a run, and coming to one: a process takes a seat when the next epoch begins, one lost or never taken.

The process runs the user's program from its start, and is *returning* until it has a seat in the fit: what it gathers
is answered from virtual worker 0's record of the same calls, and goes to nobody. Each step uses bytes that one side
leaves with the coordinator, in the session of the launch (``KeptBytes``):

    record      virtual worker 0, when the first epoch of a fit begins: the results of all gathers until then
    ready-i     virtual worker i, when Lightning loads the checkpoint that it resumes from
    state       virtual worker 0, when all have ended an epoch and somebody is ready: a checkpoint of Lightning's
    seats       virtual worker 0, before the cut at which those that are ready become members: who takes part then

Between ``state`` and the cut the returning process loads the checkpoint, and asks for its seat in the session of the
fit. All others wait meanwhile, for one lease at most.
"""

from __future__ import annotations

import io
import json
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_hetpipe.errors import SettingError, VirtualWorkerLost, say
from lightning_hetpipe.server.process.client import Client
from lightning_hetpipe.server.process.service import COORDINATOR_METHOD
from lightning_hetpipe.server.process.sessions import SessionChannel
from lightning_hetpipe.server.protocol.identifiers import CommitIndex
from lightning_hetpipe.server.protocol.messages import Departed, Leave, encode
from lightning_hetpipe.server.transport.interface import STATUS, CallRefused, Channel, Unreachable

RECORD, STATE, SEATS = "record", "state", "seats"
READY = "ready-"
EXCHANGE = "the exchange of"
"""Beginning of the names of gathers in which virtual worker 0 gives tensors to the others."""

_ANNOUNCED = 5.0
"""Seconds after which one that is ready says so again."""

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
        ordinal: Number of the last gather in the session of the launch.
        gathers: For each gather, its call and everyone's values.
    """

    session: str = ""
    settings: list[str] = field(default_factory=list)
    homes: list[int] = field(default_factory=list)
    ordinal: int = 0
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
        self.record = FitRecord(**_loaded(launch.kept.recall(RECORD)))
        if not self.record.session:
            raise too_late(index)
        self._next = 0
        self._file: NamelessFile | None = None
        self._state: dict[str, Any] = {}

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
    def _ready(self) -> str:
        return f"{READY}{self._index}-{self._launch.member.incarnation}"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint to resume from, which is there after :meth:`await_state`."""
        self._file = self._file or NamelessFile()
        return self._file.path

    @property
    def asked(self) -> dict[int, int]:
        """The virtual workers that come back at that cut, each with its incarnation in the session of the launch."""
        return dict(self._state["vws"])

    @property
    def agreed(self) -> dict[str, list[Any]]:
        """Values that the others have agreed on since their first epoch began."""
        return dict(self._state["agreed"])

    def await_state(self) -> None:
        """Wait until the others have ended an epoch, and get the checkpoint."""
        if self._state:
            return
        again = threading.Event()
        while True:
            # Again and again, as a coordinator that was started again has forgotten it.
            self._launch.kept.leave(self._ready, b"1")
            content = self._launch.kept.recall(STATE, _ANNOUNCED)
            found = _loaded(content)
            if found.get("over"):
                raise too_late(self._index)
            mine = found.get("vws", {}).get(self._index) == self._launch.member.incarnation
            # Without it, the others have gone on, and taken away what is left of it.
            if mine and (state := self._launch.kept.recall(found["checkpoint"], _ANNOUNCED)) is not None:
                self.checkpoint.write_bytes(state)
                break
            again.wait(_AGAIN if found else 0.0)  # that one is for others, or for an earlier process of this one
        self._state = found

    def seats(self, cut: int) -> list[int]:
        """The virtual workers that take part from ``cut`` on, at which this one has become a member.

        Raises:
            SeatMissed: if this was another cut than that of the checkpoint.
        """
        if cut == self._state["cut"]:
            seats = _loaded(self._launch.kept.recall(SEATS))
            if seats["cut"] == cut and self._index in seats["vws"]:
                self._launch.kept.leave(self._ready, None)
                return list(seats["vws"])
        raise SeatMissed(self._lease)

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
        self._coordinator: Channel
        self._lease = 0.0
        self._record = FitRecord()
        self._records, self._is_posted = True, False
        self._handed = ""  # the name of the checkpoint that was left last
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
            self._launch.kept.leave(RECORD, _written(vars(self._record)))

    def take_part(self) -> None:
        """Have this process, which has come back, gather with the others from now on."""
        self.close()
        self.returning = None

    def end_fit(self) -> None:
        """Let nobody come back any more: whoever does is told that the fit is over."""
        self.agreed = {}
        if self._launch is not None and self._is_posted:
            self._is_posted, self._record = False, FitRecord()
            self._launch.kept.leave(RECORD, _written(vars(self._record)))
            self._launch.kept.leave(STATE, _written({"over": True}))

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
        if self._launch is None or not checkpoint.stat().st_size:
            return []
        self._handed = f"{STATE}-{cut}"  # of its own, as one that is slow may still fetch that of an earlier cut
        self._launch.kept.leave(self._handed, checkpoint)
        state = {"vws": dict(vws), "cut": cut, "checkpoint": self._handed, "agreed": self.agreed}
        self._launch.kept.leave(STATE, _written(state))
        until, again = time.monotonic() + self._lease, threading.Event()
        while True:
            check()
            found = status_of(self._coordinator, self._record.session, self._lease).get("newcomers", [])
            here = [vw for vw in vws if vw in found]
            if len(here) == len(vws) or time.monotonic() > until:
                return here
            again.wait(_AGAIN)

    def deal(self, taken: Sequence[int], cut: int) -> None:
        """Have ``taken`` be the seats from ``cut`` on."""
        self.taken = taken
        if self._launch is not None:
            self._launch.kept.leave(SEATS, _written({"vws": list(taken), "cut": cut}))

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
            for name in (STATE, self._handed, *ready):
                self._launch.kept.leave(name, None)

    def is_of_former(self, departed: Departed, of_fit: bool) -> bool:
        """Tell whether an earlier process has ended of one that has come back."""
        return departed.incarnation < self._incarnations.get((departed.vw, of_fit), 0)


def status_of(channel: Channel, session: str, seconds: float) -> dict[str, Any]:
    """The coordinator's status of ``session``; empty while it does not answer, or knows of none."""
    found: dict[str, Any] = statuses_of(channel, seconds).get(session, {})
    return found


def statuses_of(channel: Channel, seconds: float) -> dict[str, Any]:
    """The status of a server with that of each session; empty while it does not answer."""
    try:
        found: dict[str, Any] = json.loads(channel.call(STATUS, b"", timeout=seconds))
    except (Unreachable, CallRefused):
        return {}
    return found


def goes_on(channel: Channel, session: str, lease: float) -> bool:
    """Tell whether virtual worker 0 lives, in a ``session`` that runs without this process.

    What a dead launch has left behind is told from one that runs by waiting to hear from it, for two leases.
    """
    incarnations = set[int]()

    def is_same(status: Mapping[str, Any], first: Mapping[str, Any]) -> bool:
        incarnations.add(first["incarnation"])
        return len(incarnations) == 1 and 0 not in status["newcomers"]

    return _is_heard(channel, session, 0, lease, 2 * lease, is_same)


def is_taken(channel: Channel, session: str, setting: str, vw: int, lease: float) -> bool:
    """Tell whether another process of virtual worker ``vw`` lives in ``session``, of a launch with ``setting``.

    It is waited for half a lease.
    """
    return _is_heard(channel, session, vw, lease, lease / 2, lambda status, _: setting in status["settings"])


def _is_heard(
    channel: Channel,
    session: str,
    vw: int,
    lease: float,
    seconds: float,
    fits: Callable[[Mapping[str, Any], Mapping[str, Any]], bool],
) -> bool:
    """Tell whether ``vw``, which is heard from three times in a lease, is heard from in a running ``session``.

    Args:
        seconds: Time to wait for that.
        fits: Takes a status of the session and of the member in it; False ends the wait.
    """
    began, again = time.monotonic(), threading.Event()
    while time.monotonic() < began + seconds:
        status = status_of(channel, session, lease)
        member = next((member for member in status.get("members", ()) if member["vw"] == vw), None)
        if member is None or status["phase"] != "running" or not fits(status, member):
            return False
        if member["silent_ms"] < 1000 * (time.monotonic() - began):
            return True
        again.wait(_AGAIN)
    return False


def await_record(channel: Channel, session: str, lease: float, lost: Callable[[], Exception | None]) -> bool:
    """Wait until virtual worker 0 has left its record of a fit in ``session``; False if it does not live any more.

    ``lost`` gives the error to end on, once there is one.
    """
    again = threading.Event()
    while RECORD not in status_of(channel, session, lease).get("kept", ()):
        if (failure := lost()) is not None:
            raise failure
        if not goes_on(channel, session, lease):
            return False
        again.wait(_AGAIN)
    return True


def end_former(channel: Channel, vw: int, seconds: float) -> None:
    """Have the others wait no longer for the lease of an earlier process of virtual worker ``vw``, in any fit."""
    for name, status in statuses_of(channel, seconds).items():
        members = status["members"] if name.startswith("fit-") else ()
        for incarnation in (member["incarnation"] for member in members if member["vw"] == vw):
            leave = encode(Leave(vw, incarnation, "", "started again"))
            with suppress(Unreachable, CallRefused):  # then its lease runs out
                SessionChannel(channel, name).call(COORDINATOR_METHOD, leave, timeout=seconds)


def _written(values: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def _loaded(content: bytes | bytearray | None) -> dict[str, Any]:
    """Values that :func:`_written` has written; none for no content."""
    return {} if content is None else dict(torch.load(io.BytesIO(content), weights_only=True))
