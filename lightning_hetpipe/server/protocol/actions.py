"""States of a VW's side of the protocol, and its next requests, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from lightning_hetpipe.server.protocol.messages import Request, ShardRequest


class MemberState(Enum):
    OUTSIDE = "outside"
    HELLO = "hello"
    JOIN = "join"
    CONFIRM = "confirm"
    LOAD = "load"
    LOADED = "loaded"
    STAGE = "stage"
    PUSH = "push"
    ARRIVE = "arrive"
    PULL = "pull"
    READ = "read"
    PULLED = "pulled"
    GATHER = "gather"
    FETCH = "fetch"
    IDLE = "idle"


class Goal(Enum):
    """Unfinished call of the VW's owner."""

    NONE = "none"
    START = "start"
    WAVE = "wave"
    CUT = "cut"
    GATHER = "gather"


class Body(Enum):
    """Body of a request or of its answer."""

    NONE = "none"
    UPDATE = "update"
    WEIGHTS = "weights"
    """Sent: those of the last pull."""
    INCOMING = "incoming"
    """Received: weights."""
    PART = "part"
    RESULT = "result"
    """Received: the result of a gather."""
    GATHERED = "gathered"
    """Sent: the result of the last gather."""


@dataclass(frozen=True)
class Ask:
    """One request to the coordinator."""

    message: Request
    body: Body = Body.NONE


@dataclass(frozen=True)
class AskShards:
    """A request to each of several servers, by their index."""

    messages: Mapping[int, ShardRequest]
    body: Body = Body.NONE
