"""Messages: the requests of a VW to the coordinator and to the shards, and their answers.

Every request names its sender (``vw``, ``incarnation``), and most requests the ``generation`` of their weights. An
incarnation is a number that grows with every start of the VW. A `RemoteFault`, which the transport carries as text,
refuses a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from lightning_hetpipe.server.protocol import identifiers
from lightning_hetpipe.server.transport.codec import Codec, Malformed
from lightning_hetpipe.server.transport.interface import HEADER_LIMIT


@dataclass(frozen=True)
class Parameter:
    """Parameter of the model. ``dtype`` and ``update_dtype`` are torch's names without "torch."."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    update_dtype: str


@dataclass(frozen=True)
class TrainingSignature:
    """Settings that must be equal on all VWs, because the servers compute with them. ``settings`` are pairs
    "name=value" that the protocol only compares. Only VW 0's ``least`` counts: the number of VWs, including VW 0, with
    which a session may begin before other VWs come. 0 means all."""

    version: str
    virtual_workers: int
    clock_distance: int
    aggregate: str
    servers: int
    settings: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    least: int = 0


@dataclass(frozen=True)
class GatherPart:
    """Part of one VW in a gather: ``size`` bytes of the body."""

    vw: int
    size: int


@dataclass(frozen=True)
class Gathered:
    """Result of a complete gather. The body consists of the parts in order."""

    cut: int
    ordinal: int
    parts: tuple[GatherPart, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def split(self, body: memoryview) -> dict[int, memoryview]:
        """Return the VWs' parts of ``body``."""
        ends = accumulate(part.size for part in self.parts)
        return {part.vw: body[end - part.size : end] for part, end in zip(self.parts, ends, strict=True)}


@dataclass(frozen=True)
class Report:
    """State of a VW, from which lost servers are rebuilt (L5). The defaults are of a VW that has just started.

    Attributes:
        term: Term of the last generation in which it was a member, or 0.
        commit_index: Commit index of its last pull, or None.
        clock: c_local, or the clock of the pending update.
        pending: Whether it has an update that none of its pulls includes.
        cut, cut_clock: The last cut that it has passed, and the clock there. Cut 0 is the start.
        cut_at: The clock at which VW 0 wants to cut, as far as it knows, or -1.
        gathered: The last gather of which it has the result, which is the request's body.
    """

    term: int = 0
    commit_index: identifiers.CommitIndex | None = None
    clock: int = 0
    pending: bool = False
    cut: int = 0
    cut_clock: int = 0
    cut_at: int = -1
    gathered: Gathered | None = None


@dataclass(frozen=True)
class FromMember:
    vw: int
    incarnation: int


@dataclass(frozen=True)
class InGeneration(FromMember):
    generation: str


# Requests to the coordinator.


@dataclass(frozen=True)
class Join(FromMember):
    """Request to become a member. ``attempt`` grows with every new report. ``contents`` has each shard's
    ``Holding.content``."""

    attempt: int
    signature: TrainingSignature
    report: Report
    contents: tuple[str, ...]


@dataclass(frozen=True)
class Loaded(InGeneration):
    """Message that all shards hold the weights of ``LoadNow``."""


@dataclass(frozen=True)
class Pushed(InGeneration):
    """Message that all shards hold the update of ``clock``. With ``cut``, VW 0 wants all VWs to cut soon, at one
    clock."""

    clock: int
    cut: bool


@dataclass(frozen=True)
class Pull(InGeneration):
    """Request for a read lease. A VW numbers its read leases upwards."""

    read_lease: int


@dataclass(frozen=True)
class Pulled(InGeneration):
    """Message that the weights have been read. It ends the read lease."""

    read_lease: int


@dataclass(frozen=True)
class Arrive(InGeneration):
    """Message that the VW waits at ``cut`` and has pushed its update. With ``admit``, new VWs may join there."""

    cut: int
    admit: bool


@dataclass(frozen=True)
class Gather(InGeneration):
    """Part of a gather, in the body. ``cut`` is the last cut that the VW has passed. ``ordinal`` counts upwards."""

    cut: int
    ordinal: int


@dataclass(frozen=True)
class Heartbeat(InGeneration):
    """Message that the VW is alive."""


@dataclass(frozen=True)
class KeepBytes(FromMember):
    """Request to keep the body under ``name``, or with an empty body, to drop it. Only the incarnations ``readers`` may
    recall it, or all if there are none."""

    name: str
    readers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Recall(FromMember):
    """Request for the content under ``name`` for this VW, once it is there. The answer's body has it."""

    name: str


@dataclass(frozen=True)
class Leave(FromMember):
    """Message that the VW is done. If ``failure`` gives a reason, the VW has failed, and all other VWs must end.
    Otherwise the other VWs go on without it, and receive ``why``."""

    failure: str
    why: str = ""


# Requests to a shard.


@dataclass(frozen=True)
class Hello(FromMember):
    """Request for what the shard holds."""


@dataclass(frozen=True)
class Load(InGeneration):
    """Request to store the body, the weights of ``parameters`` in order. They replace only the content ``over``, so a
    late request replaces nothing."""

    over: str
    included: tuple[identifiers.UpdateId, ...]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class StageUpdate(InGeneration):
    """Request to keep an update, in the body, until it is committed. ``part`` has the numbers, ascending, of the
    shard's parameters in the body. Empty means all. Other requests bring the other parts of the update. A pull finds
    all parts or none."""

    clock: int
    part: tuple[int, ...] = ()


@dataclass(frozen=True)
class Read(InGeneration):
    """Request for the weights after ``tail``, the commits that follow the generation's first ``start`` commits.
    ``part`` selects weights as in ``StageUpdate``."""

    start: int
    tail: tuple[identifiers.Commit, ...]
    part: tuple[int, ...] = ()


# Answers.


@dataclass(frozen=True)
class Departed:
    """Member that is gone after ``clock`` waves, while the other VWs go on. ``why`` is empty if it left by itself."""

    vw: int
    incarnation: int
    clock: int
    why: str


@dataclass(frozen=True)
class Done:
    """Answer without content. ``departed`` has the last member of each VW that has departed."""

    departed: tuple[Departed, ...] = ()


@dataclass(frozen=True)
class NotYet:
    """Answer to ask again. ``waits_for`` names the awaited event. The VWs ``missing`` must join before any VW can."""

    waits_for: str
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lost:
    """Updates of a VW from clock ``first`` to ``last`` that no process holds any more. If the coordinator was
    restarted, it does not know whether there were lost updates, and ``last`` is -1."""

    vw: int
    incarnation: int
    first: int
    last: int


@dataclass(frozen=True)
class Joined:
    """Answer that the VW is a member of a generation that began at commit index ``base``, with ``lost`` updates.
    ``clock`` is the VW's c_local, without its pending update unless ``base`` includes it. ``cut`` is the last cut that
    any VW has passed."""

    generation: str
    base: identifiers.CommitIndex
    clock: int
    cut: int
    lost: tuple[Lost, ...]


@dataclass(frozen=True)
class LoadNow:
    """Answer that the VW holds the newest surviving weights. It has to load them into all shards, over ``contents``."""

    generation: str
    base: identifiers.CommitIndex
    contents: tuple[str, ...]


@dataclass(frozen=True)
class Granted:
    """Read lease: the shards may be read at ``commit_index``, which is ``tail`` after ``start``. ``slowest`` is
    c_global, or c_local if all VWs wait at a cut. ``cut_at`` is the clock at which all VWs have to cut, or -1."""

    read_lease: int
    commit_index: identifiers.CommitIndex
    start: int
    tail: tuple[identifiers.Commit, ...]
    slowest: int
    cut_at: int


@dataclass(frozen=True)
class Closed:
    """Answer that all VWs have arrived at the cut. ``clock`` is now the clock of all."""

    clock: int


@dataclass(frozen=True)
class Holding:
    """Content of a shard: a generation, or the epoch of a server that has just started."""

    content: str


AboutKept = KeepBytes | Recall
MemberRequest = Loaded | Pushed | Pull | Pulled | Arrive | Gather | Heartbeat
Request = Join | MemberRequest | Leave | AboutKept
"""Requests to the coordinator."""
ShardRequest = Hello | Load | StageUpdate | Read
Answer = Done | NotYet | Joined | LoadNow | Granted | Closed | Gathered | Holding
Message = Request | ShardRequest | Answer

_CODEC = Codec((*Request.__args__, *ShardRequest.__args__, *Answer.__args__), HEADER_LIMIT)


def encode(message: object) -> bytes:
    """Encode ``message``. Raise LocalFault if the receiver would not accept it."""
    try:
        return _CODEC.encode(message)
    except ValueError as error:
        raise identifiers.LocalFault(str(error)) from error


def decode(data: bytes | memoryview) -> Message:
    """Decode a message. Raise RemoteFault if ``data`` is not exactly one well-formed message."""
    try:
        message: Message = _CODEC.decode(data)
    except Malformed as error:
        raise identifiers.RemoteFault(identifiers.Refusal.MALFORMED, str(error)) from error
    return message
