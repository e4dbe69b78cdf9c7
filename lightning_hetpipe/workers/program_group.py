"""Group of a program: its membership in the virtual workers of its launch, which all its Trainers share."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning.fabric.plugins import ClusterEnvironment

from lightning_hetpipe.launch import servers
from lightning_hetpipe.launch.ends import lost_workers
from lightning_hetpipe.launch.ranks import Rank, Role
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.server.process.signals import how
from lightning_hetpipe.workers.shared_metrics import share

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


def meet(
    rank: Rank, environment: ClusterEnvironment, wsp: WSPSettings, timeout: float, further: Sequence[str] | None
) -> Group:
    """Meet the other virtual workers at the servers, or keep the group of the program's earlier run. ``timeout`` is the
    seconds for which servers may be silent. ``further`` is as for ``servers.find``."""
    from lightning_hetpipe.workers.group import Group  # loads gRPC, which one virtual worker does not need

    global _group
    if _group is not None:
        _group.settings.check_later(wsp)
    found = servers.find(rank, environment, wsp, timeout, further)
    if _group is not None and _group.is_open and _group.coordinator == found.coordinator:
        _group.renew(found, wsp, timeout)
        return _group
    part()
    _group = Group(
        rank.index,
        rank.size,
        found,
        wsp,
        timeout,
        servers.lost,
        place=f"node {rank.node}, {platform.node()}" if rank.nodes > 1 else "",
        on_loss=lost_workers.note,
        stays=rank.role is Role.EXTERNAL,
        on_return=_come_back,
        least=rank.least,
    )
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
