"""Group of a program: its membership in the virtual workers of its launch, which all its Trainers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_hetpipe.launch import servers
from lightning_hetpipe.launch.ends import lost_workers
from lightning_hetpipe.launch.servers import LaunchSettings
from lightning_hetpipe.server.process.signals import how
from lightning_hetpipe.workers.collectives import share

if TYPE_CHECKING:
    from lightning_hetpipe.workers.group import Group


LAUNCH, FIT = "talk", "fit"
"""Kinds of sessions: sessions of the launch, without shared weights, and sessions of a fit."""

_sessions = {LAUNCH: 0, FIT: 0}
"""Number of sessions of the launch so far, by kind. All its processes run one program, so they count alike."""


def next_session(kind: str) -> str:
    """Return the name of the next session of a kind."""
    _sessions[kind] += 1
    return f"{kind}-{_sessions[kind]}"


def go_on_from(session: str) -> None:
    """Continue the count after ``session`` in a process that has not seen the earlier sessions of its kind."""
    kind, _, number = session.rpartition("-")
    _sessions[kind] = int(number)


_group: Group | None = None
_ended: dict[int, str] = {}
"""Descriptions of the ends of other virtual workers of this node."""


def meet(launch: LaunchSettings, further: Sequence[str]) -> Group:
    """Meet the other virtual workers at the servers, or keep the group of the program's earlier run. ``further`` is as
    for ``servers.find``."""
    from lightning_hetpipe.workers.group import Group  # loads gRPC, which one virtual worker does not need

    global _group
    if _group is not None:
        _group.settings.check_later(launch.wsp)
    found = servers.find(launch, further)
    if _group is not None and _group.is_open and _group.coordinator == found.coordinator:
        _group.renew(launch, found)
        return _group
    part()
    _group = Group(launch, found, lost_workers.note, _come_back)
    _group.lose(_ended)
    _group.open()
    return _group


def note_end(vw: int, code: int) -> None:
    """Record that the process of another virtual worker of this node has ended with exit code ``code``."""
    _ended[vw] = how(code)
    if _group is not None:
        _group.lose(_ended)


def _come_back(vw: int) -> None:
    _ended.pop(vw, None)
    lost_workers.find(vw)


def part() -> None:
    """Leave the group of an earlier launch, if any."""
    global _group
    group, _group = _group, None
    share(None)
    if group is not None:
        group.part()


def end() -> None:
    """End the launch."""
    part()
    _ended.clear()
    _sessions.update(dict.fromkeys(_sessions, 0))
    servers.stop()
