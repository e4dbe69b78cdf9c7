"""Messages: the requests of a VW to the coordinator and to the shards, and their answers.

Every request names its sender (``vw``, ``incarnation``), and most the ``generation`` of the weights that they are
about. An incarnation is a number that grows with every start of the VW. A request that cannot be granted is answered
with a `RemoteFault`, which the transport carries as text.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetpipe.server.protocol import identifiers
from lightning_hetpipe.server.transport.codec import Codec, Malformed
from lightning_hetpipe.server.transport.interface import HEADER_LIMIT


@dataclass(frozen=True)
class Parameter:
    """One parameter; ``dtype`` and ``update_dtype`` are torch's names, without "torch."."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    update_dtype: str


@dataclass(frozen=True)
class TrainingSignature:
    """Everything that must be the same on all VWs, because the servers compute with it.

    ``settings`` are pairs "name=value" that the protocol only compares. ``least`` is that of VW 0, and may differ on
    others: with so many VWs, itself among them, a session may begin, and others come later; 0 for all.
    """

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
    """One VW's part of a gather: ``size`` bytes of the body."""

    vw: int
    size: int


@dataclass(frozen=True)
class Gathered:
    """A complete gather. Its parts follow each other in the body."""

    cut: int
    ordinal: int
    parts: tuple[GatherPart, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Report:
    """State of a VW, from which lost servers are rebuilt (L5).

    Attributes:
        term: of the last generation that it was a member of; 0 for none.
        commit_index: of its last pull; ``None`` without one.
        clock: c_local; that of the pending update, if there is one.
        pending: whether it has an update that none of its pulls includes.
        cut, cut_clock: the last cut it has passed, and the clock there.
        cut_at: the clock at which VW 0 wants to cut, as far as it knows; -1 for none.
        gathered: the last gather of which it has the result, which is the request's body.
    """

    term: int = 0
    commit_index: identifiers.CommitIndex | None = None
    clock: int = 0
    pending: bool = False
    cut: int = 0
    cut_clock: int = 0
    cut_at: int = -1
    gathered: Gathered | None = None


NOTHING = Report()
"""Report of a VW that has just started. Cut 0 is the start."""


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
    """Ask to become a member.

    Attributes:
        attempt: grows with every new report.
        contents: of each shard, as ``Holding`` says.
    """

    attempt: int
    signature: TrainingSignature
    report: Report
    contents: tuple[str, ...]


@dataclass(frozen=True)
class Loaded(InGeneration):
    """All shards hold the weights that ``LoadNow`` asked for."""


@dataclass(frozen=True)
class Pushed(InGeneration):
    """All shards hold the update of ``clock``. ``cut``: VW 0 wants all to cut at one clock, as soon as they can."""

    clock: int
    cut: bool


@dataclass(frozen=True)
class Pull(InGeneration):
    """Ask for a read lease; a VW numbers its read leases, upwards."""

    read_lease: int


@dataclass(frozen=True)
class Pulled(InGeneration):
    """The weights have been read; the read lease ends."""

    read_lease: int


@dataclass(frozen=True)
class Arrive(InGeneration):
    """The VW waits at ``cut``, and has pushed its update. ``admit``: new VWs may join there."""

    cut: int
    admit: bool


@dataclass(frozen=True)
class Gather(InGeneration):
    """Give a part of a gather, the body. ``cut`` is the last one that the VW has passed; ``ordinal`` counts upwards."""

    cut: int
    ordinal: int


@dataclass(frozen=True)
class Heartbeat(InGeneration):
    """The VW is alive."""


@dataclass(frozen=True)
class KeepBytes(FromMember):
    """Keep the body under ``name``; an empty one ends that.

    ``readers``: incarnations of the VWs that may recall it; empty for all.
    """

    name: str
    readers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Recall(FromMember):
    """Ask for what is kept under ``name`` for this VW, once something is: the body of the answer."""

    name: str


@dataclass(frozen=True)
class Leave(FromMember):
    """The VW is done; or has failed, if ``failure`` says why, and the others must end too.

    ``why``: the others go on without it, and are told that.
    """

    failure: str
    why: str = ""


# Requests to a shard.


@dataclass(frozen=True)
class Hello(FromMember):
    """Ask what the shard holds."""


@dataclass(frozen=True)
class Load(InGeneration):
    """Store weights, the body: all of ``parameters``, one after the other.

    They replace the content ``over`` only, so a request that comes late replaces nothing.
    """

    over: str
    included: tuple[identifiers.UpdateId, ...]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class StageUpdate(InGeneration):
    """Keep an update, the body, until it is committed.

    ``part``: the numbers, ascending, of those of the shard's parameters that the body has; empty for all. Other parts
    of the update come in other requests; a pull finds all of them or none.
    """

    clock: int
    part: tuple[int, ...] = ()


@dataclass(frozen=True)
class Read(InGeneration):
    """Ask for the weights after ``tail``, the commits that follow the first ``start`` ones of the generation.

    ``part``: as of a ``StageUpdate``, for the weights that are wanted.
    """

    start: int
    tail: tuple[identifiers.Commit, ...]
    part: tuple[int, ...] = ()


# Answers.


@dataclass(frozen=True)
class Departed:
    """A member that the others go on without, after ``clock`` waves; ``why`` is empty where it has left by itself."""

    vw: int
    incarnation: int
    clock: int
    why: str


@dataclass(frozen=True)
class Done:
    """``departed``: of each VW, the last member that the coordinator has seen go."""

    departed: tuple[Departed, ...] = ()


@dataclass(frozen=True)
class NotYet:
    """Ask again. ``waits_for`` names what is awaited; ``missing`` are VWs that have to join before anybody can."""

    waits_for: str
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lost:
    """Updates of a VW that nobody holds any more, from clock ``first`` to ``last``.

    -1 for ``last``: the coordinator was restarted, too, and cannot know whether there were any.
    """

    vw: int
    incarnation: int
    first: int
    last: int


@dataclass(frozen=True)
class Joined:
    """The VW is a member.

    Attributes:
        base: the commit index with which the generation began.
        clock: the VW's c_local, without its pending update unless ``base`` includes that.
        cut: the last one that somebody has passed.
        lost: updates that the lost servers took with them.
    """

    generation: str
    base: identifiers.CommitIndex
    clock: int
    cut: int
    lost: tuple[Lost, ...]


@dataclass(frozen=True)
class LoadNow:
    """The VW holds the newest surviving weights: it has to load them into all shards, over ``contents``."""

    generation: str
    base: identifiers.CommitIndex
    contents: tuple[str, ...]


@dataclass(frozen=True)
class Granted:
    """A read lease: the shards may be read at ``commit_index``, which is ``tail`` after ``start``.

    ``clock`` and ``slowest`` are c_local and c_global (the same, if everyone waits at a cut); ``cut_at`` is the clock
    at which all have to cut, or -1.
    """

    read_lease: int
    commit_index: identifiers.CommitIndex
    start: int
    tail: tuple[identifiers.Commit, ...]
    clock: int
    slowest: int
    cut_at: int


@dataclass(frozen=True)
class Closed:
    """All have arrived at the cut; the clock is now the same everywhere."""

    cut: int
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
    """
    Raises:
        LocalFault: if the other side would not accept ``message``.
    """
    try:
        return _CODEC.encode(message)
    except ValueError as error:
        raise identifiers.LocalFault(str(error)) from error


def decode(data: bytes | memoryview) -> Message:
    """
    Raises:
        RemoteFault: if ``data`` is not exactly one well-formed message.
    """
    try:
        message: Message = _CODEC.decode(data)
    except Malformed as error:
        raise identifiers.RemoteFault(identifiers.Refusal.MALFORMED, str(error)) from error
    return message
