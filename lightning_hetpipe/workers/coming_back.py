"""Coming to a run that goes on: a process takes a seat when the next epoch begins, one that was lost or never taken.

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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_hetpipe.errors import SettingError, VirtualWorkerLost
from lightning_hetpipe.server.process.client import Client
from lightning_hetpipe.server.process.notices import say
from lightning_hetpipe.server.process.service import COORDINATOR_METHOD
from lightning_hetpipe.server.process.sessions import SessionChannel
from lightning_hetpipe.server.protocol.messages import Leave, encode
from lightning_hetpipe.server.transport.interface import STATUS, CallRefused, Channel, Unreachable
from lightning_hetpipe.workers.nameless_file import NamelessFile

RECORD, STATE, SEATS = "record", "state", "seats"
READY = "ready-"
CHUNK = 16 << 20
"""Bytes that are left under one name at a time."""

_ANNOUNCED = 5.0
"""Seconds after which one that is ready says so again."""

AGAIN = 0.1
"""Seconds between looks at the coordinator's status."""


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
        self.record = FitRecord(**loaded(recall_parts(launch, RECORD)))
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
    def cut(self) -> int:
        """Number of the cut at which it becomes a member."""
        return int(self._state["cut"])

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
            found = {} if content is None else loaded(content)
            if found.get("over"):
                raise too_late(self._index)
            mine = found.get("vws", {}).get(self._index) == self._launch.member.incarnation
            if mine and self._has_fetched(found["parts"]):
                break
            again.wait(AGAIN if found else 0.0)  # that one is for others, or for an earlier process of this one
        self._state = found

    def _has_fetched(self, parts: Sequence[str]) -> bool:
        """Write the checkpoint; False if the others have gone on, and taken away what is left of it."""
        with self.checkpoint.open("wb") as file:
            for part in parts:
                if (content := self._launch.kept.recall(part, _ANNOUNCED)) is None:
                    return False
                file.write(content)
        return True

    def seats(self, cut: int) -> list[int]:
        """The virtual workers that take part from ``cut`` on, at which this one has become a member.

        Raises:
            SeatMissed: if this was another cut than that of the checkpoint.
        """
        if cut == self.cut:
            seats = loaded(recalled(self._launch, SEATS))
            if seats["cut"] == cut and self._index in seats["vws"]:
                self._launch.kept.leave(self._ready, None)
                return list(seats["vws"])
        raise SeatMissed(self._lease)

    def close(self) -> None:
        """Delete the checkpoint."""
        if self._file is not None:
            self._file.close()


def leave_parts(client: Client, name: str, content: bytes) -> None:
    """Leave ``content`` of any size under ``name``, for :func:`recall_parts`."""
    starts = range(0, max(1, len(content)), CHUNK)
    for part, start in enumerate(starts):
        client.kept.leave(f"{name}-{part}", content[start : start + CHUNK])
    client.kept.leave(name, written({"parts": len(starts)}))


def recall_parts(client: Client, name: str) -> bytes:
    """Return what was left under ``name``, once it is."""
    parts = loaded(recalled(client, name))["parts"]
    return b"".join(recalled(client, f"{name}-{part}") for part in range(parts))


def recalled(client: Client, name: str) -> bytes:
    """Return what is kept under ``name``, once something is."""
    content = client.kept.recall(name)
    assert content is not None
    return content


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
        again.wait(AGAIN)
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
        again.wait(AGAIN)
    return True


def end_former(channel: Channel, vw: int, seconds: float) -> None:
    """Have the others wait no longer for the lease of an earlier process of virtual worker ``vw``, in any fit."""
    for name, status in statuses_of(channel, seconds).items():
        members = status["members"] if name.startswith("fit-") else ()
        for incarnation in (member["incarnation"] for member in members if member["vw"] == vw):
            leave = encode(Leave(vw, incarnation, "", "started again"))
            with suppress(Unreachable, CallRefused):  # then its lease runs out
                SessionChannel(channel, name).call(COORDINATOR_METHOD, leave, timeout=seconds)


def written(values: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def loaded(content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    return found
