"""What a coordinator decides, as values: from a list of them it can be checked that it kept the laws L3 to L6."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class GenerationBegan:
    """A generation: ``members`` are (VW, incarnation, clock), ``count`` the updates that its weights include."""

    era: int
    count: int
    members: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class UpdatePushed:
    """All shards hold an update, which is not added yet."""

    vw: int
    incarnation: int
    clock: int


@dataclass(frozen=True)
class UpdateCommitted:
    """An update got its place in the order: it is the ``count``-th since the run's start."""

    vw: int
    incarnation: int
    clock: int
    divisor: int
    count: int


@dataclass(frozen=True)
class ReadGranted:
    """A VW that has pushed ``clock`` waves takes weights with the first ``count`` updates.

    ``slowest`` is c_global; None if everyone waits at a cut, or has just passed it.
    """

    vw: int
    turn: int
    clock: int
    slowest: int | None
    count: int


@dataclass(frozen=True)
class CutHeld:
    """A VW may not take weights yet, and why; told once for each reason."""

    vw: int
    turn: int
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
    """A VW is no member any more: ``why`` it was left out, after ``clock`` waves; or it has left, and why is empty."""

    vw: int
    clock: int
    why: str


Decision = GenerationBegan | UpdatePushed | UpdateCommitted | ReadGranted | CutHeld | CutClosed | MemberLeft
Note = Callable[[Decision], None]


def ignore(decision: Decision) -> None:
    """For who wants to know of none."""


def line(room: str, decision: Decision) -> str:
    """``decision``, of a room, as a line of JSON."""
    return json.dumps({"room": room, "decision": type(decision).__name__, **asdict(decision)}) + "\n"
