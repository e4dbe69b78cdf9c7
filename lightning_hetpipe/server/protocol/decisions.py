"""Decisions of a coordinator, as values, from which the laws L3 to L6 can be checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class GenerationBegan:
    """A generation began: ``members`` are (VW, incarnation, clock), ``count`` the updates that its weights include."""

    term: int
    count: int
    members: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class UpdatePushed:
    """All shards hold an update, which is not committed yet."""

    vw: int
    incarnation: int
    clock: int


@dataclass(frozen=True)
class UpdateCommitted:
    """An update got its place in the log: it is the ``count``-th since the run's start."""

    vw: int
    incarnation: int
    clock: int
    divisor: int
    count: int


@dataclass(frozen=True)
class ReadGranted:
    """A VW that has pushed ``clock`` waves reads weights with the first ``count`` updates.

    ``slowest`` is c_global; None if everyone waits at a cut, or has just passed it.
    """

    vw: int
    read_lease: int
    clock: int
    slowest: int | None
    count: int


@dataclass(frozen=True)
class ReadHeld:
    """A VW may not read weights yet, for the reason ``why``; noted once for each reason."""

    vw: int
    read_lease: int
    clock: int
    slowest: int | None
    why: str


@dataclass(frozen=True)
class CutClosed:
    """All have come to a cut; ``clock`` is everyone's now."""

    cut: int
    clock: int
    vws: tuple[int, ...]


@dataclass(frozen=True)
class MemberLeft:
    """A VW is no member any more, after ``clock`` waves; ``why`` it was left out is empty if it has left by itself."""

    vw: int
    clock: int
    why: str


Decision = GenerationBegan | UpdatePushed | UpdateCommitted | ReadGranted | ReadHeld | CutClosed | MemberLeft
Note = Callable[[Decision], None]


def ignore(decision: Decision) -> None:
    """Drop a decision."""


def line(session: str, decision: Decision, time: float) -> str:
    """Write a session's ``decision``, made at ``time``, in seconds since 1970, as a line of JSON."""
    told = {"time": round(time, 6), "session": session, "decision": type(decision).__name__}
    return json.dumps({**told, **asdict(decision)}) + "\n"
