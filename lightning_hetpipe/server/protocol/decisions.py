"""Decisions of a coordinator as values, from which the laws L3 to L6 can be checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class GenerationBegan:
    """Beginning of a generation. ``members`` are (VW, incarnation, clock). Its weights include ``count`` updates."""

    term: int
    count: int
    members: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class UpdatePushed:
    """Arrival of an update at all shards. It is not committed yet."""

    vw: int
    incarnation: int
    clock: int


@dataclass(frozen=True)
class UpdateCommitted:
    """Commit of an update to the log, as the ``count``-th since the run's start."""

    vw: int
    incarnation: int
    clock: int
    divisor: int
    count: int


@dataclass(frozen=True)
class ReadGranted:
    """Permission for a VW that has pushed ``clock`` waves to read weights with the first ``count`` updates. ``slowest``
    is c_global, or None if all VWs wait at a cut, or this VW has just passed a cut."""

    vw: int
    read_lease: int
    clock: int
    slowest: int | None
    count: int


@dataclass(frozen=True)
class ReadHeld:
    """Wait of a VW that may not read weights yet, for the reason ``why``. It is noted once for each reason."""

    vw: int
    read_lease: int
    clock: int
    slowest: int | None
    why: str


@dataclass(frozen=True)
class CutClosed:
    """Arrival of all VWs at a cut. ``clock`` is now the clock of all."""

    cut: int
    clock: int
    vws: tuple[int, ...]


@dataclass(frozen=True)
class MemberLeft:
    """End of a membership after ``clock`` waves. ``why`` is the reason for leaving the VW out, or empty if it left."""

    vw: int
    clock: int
    why: str


Decision = GenerationBegan | UpdatePushed | UpdateCommitted | ReadGranted | ReadHeld | CutClosed | MemberLeft
Note = Callable[[Decision], None]


def ignore(decision: Decision) -> None:
    """Drop a decision."""


def line(session: str, decision: Decision, time: float) -> str:
    """Write a session's ``decision`` as a line of JSON. ``time`` is in seconds since 1970."""
    told = {"time": round(time, 6), "session": session, "decision": type(decision).__name__}
    return json.dumps({**told, **asdict(decision)}) + "\n"
