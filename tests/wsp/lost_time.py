"""Time that faults cost a run: from when they struck, and what the run's coordinator has recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

LOSES_ONE = ("kill", "stop")
"""Faults after which a virtual worker may be missing."""

Span = tuple[float, float]


@dataclass(frozen=True)
class Strike:
    """A fault that has struck.

    Attributes:
        what: Its kind; see :func:`tests.wsp.faults.do`.
        vw: The virtual worker in which it did.
        time: When, in seconds since 1970.
    """

    what: str
    vw: int
    time: float


@dataclass(frozen=True)
class LostTime:
    """Time that a fault cost; of faults that strike while an earlier one still lasts, each has what both cost.

    Attributes:
        what: Its kind.
        waited: Seconds by which the wave in which it struck, and the D + 1 after it, took longer than waves do
            (the median): for so long, all waited.
        missing: Seconds after that, until the virtual worker that it befell trained again, or until the run ended.
        size: Virtual workers of the run.
    """

    what: str
    waited: float
    missing: float
    size: int

    @property
    def seconds(self) -> float:
        """Seconds of the whole run's training; while one of N is missing, 1/N of it is lost."""
        return self.waited + self.missing / self.size


def decisions_of(log: Path, session: str = "fit-1") -> list[dict[str, Any]]:
    """The decisions of a session."""
    return [each for each in map(json.loads, log.read_text().splitlines()) if each["session"] == session]


def strikes_of(faults: Sequence[Mapping[str, Any]]) -> list[Strike]:
    """Those of ``faults`` that have struck, by their marks."""
    times = [(fault, Path(fault["mark"])) for fault in faults]
    return [
        Strike(fault["what"], fault["vw"], float(told))
        for fault, mark in times
        if mark.exists() and (told := mark.read_text())  # one that was killed before that has written nothing
    ]


def lost_time(
    decisions: Sequence[Mapping[str, Any]],
    strikes: Sequence[Strike],
    size: int,
    distance: int = 0,
    held: Sequence[Span] = (),
) -> list[LostTime]:
    """The time that each of ``strikes`` cost.

    Args:
        decisions: Of the coordinator.
        strikes: Faults.
        size: Virtual workers of the run.
        distance: D.
        held: When the test had virtual worker 0 wait, which does not count.
    """
    ends = wave_ends(decisions)
    if len(ends) < 2:
        return []
    usual = median(_outside(held, *each) for each in pairwise(ends))
    found = []
    for strike in strikes:
        before = max((end for end in ends if end <= strike.time), default=ends[0])
        after = [end for end in ends if end > strike.time][: distance + 2]
        last = after[-1] if after else before
        waited = max(0.0, _outside(held, before, last) - usual * len(after))
        missing = 0.0
        if strike.what in LOSES_ONE:
            missing = max(0.0, _trains_again(decisions, strike, ends[-1]) - last)
        found.append(LostTime(strike.what, waited, missing, size))
    return found


def wave_ends(decisions: Sequence[Mapping[str, Any]], vw: int = 0) -> list[float]:
    """Times at which waves of ``vw`` were first committed; what was lost with a server is committed once more."""
    ends: list[float] = []
    newest = -1
    for each in decisions:
        if each["decision"] == "UpdateCommitted" and each["vw"] == vw and each["clock"] > newest:
            newest = each["clock"]
            ends.append(each["time"])
    return ends


def summary(lost: Sequence[tuple[str, float]]) -> str:
    """The medians of time lost, of (kind, seconds), overall and for each kind."""
    if not lost:
        return "time lost per fault: no fault has struck"
    kinds = {what: [seconds for kind, seconds in lost if kind == what] for what, _ in sorted(lost)}
    each = ", ".join(f"{what} {median(seconds):.1f} s of {len(seconds)}" for what, seconds in kinds.items())
    return f"time lost per fault: median {median(seconds for _, seconds in lost):.1f} s of {len(lost)} ({each})"


def _trains_again(decisions: Sequence[Mapping[str, Any]], strike: Strike, end: float) -> float:
    """When the virtual worker has pushed its first update since; ``end`` if it never does."""
    pushes = (
        each["time"]
        for each in decisions
        if each["decision"] == "UpdatePushed" and each["vw"] == strike.vw and each["time"] > strike.time
    )
    return next(pushes, end)


def _outside(held: Sequence[Span], begin: float, end: float) -> float:
    """Seconds from ``begin`` to ``end`` that lie in no span of ``held``."""
    return end - begin - sum(max(0.0, min(end, last) - max(begin, first)) for first, last in held)
