"""The states of a VW's side of the protocol, and what it can have to do next: requests, as values."""

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
    """What the VW's owner asked for last, and has not got yet."""

    NONE = "none"
    START = "start"
    WAVE = "wave"
    CUT = "cut"
    GATHER = "gather"


class Body(Enum):
    """What travels with a request."""

    NONE = "none"
    UPDATE = "update"
    WEIGHTS = "weights"
    """Those of the last pull: sent."""
    INCOMING = "incoming"
    """Weights: received."""
    PART = "part"
    RESULT = "result"
    """Of a gather: received."""
    KEPT = "kept"
    """The result of the last gather: sent."""


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
