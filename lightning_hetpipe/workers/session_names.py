"""Names of the sessions on the servers: those of a launch's runs, and of its fits, numbered from 1."""

from __future__ import annotations

import functools
import json

from lightning_hetpipe.launch import parent_watch

SESSIONS = "HETPIPE_SESSIONS"
"""A variable for children of our launcher: the number of sessions before they were started."""

LAUNCH, FIT = "talk", "fit"
"""Kinds of sessions: of the launch, in which no weights are shared, and of a fit."""


@functools.cache
def _sessions() -> dict[str, int]:
    """Sessions so far, by kind. All processes of a launch run the same program, and so count alike."""
    return {LAUNCH: 0, FIT: 0, **json.loads(parent_watch.launcher_variables().get(SESSIONS, "{}"))}


def sessions_so_far() -> dict[str, str]:
    """Variables for processes that take part from now on."""
    return {SESSIONS: json.dumps(_sessions())}


def next_session(kind: str) -> str:
    """Name of the next session of a kind."""
    _sessions()[kind] += 1
    return f"{kind}-{_sessions()[kind]}"


def go_on_from(session: str) -> None:
    """Count on from ``session``, in a process that has not seen the earlier ones of its kind."""
    kind, _, number = session.rpartition("-")
    _sessions()[kind] = int(number)
