"""The messages: what a VW may ask of the coordinator and of the shards, and what they answer.

Every request names its sender (``vw``, ``incarnation``) and the ``generation`` of the weights that it is about. An
incarnation is a number that grows with every start of the VW. Every reply carries the server's ``epoch``.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetpipe.server.protocol.identifiers import Commit, CommitIndex, Refusal, UpdateId
from lightning_hetpipe.server.transport.codec import Codec


@dataclass(frozen=True)
class Parameter:
    """One parameter; ``dtype`` and ``update_dtype`` are torch's names, without "torch."."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    update_dtype: str


@dataclass(frozen=True)
class TrainingSignature:
    """What must be the same on all VWs, because the servers compute with it.

    ``settings`` are pairs "name=value", compared one by one, that the protocol itself has no use for.
    """

    version: str
    virtual_workers: int
    clock_distance: int
    aggregate: str
    servers: int
    settings: tuple[str, ...]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class GatherPart:
    """One VW's part of a gather: ``size`` bytes of the body."""

    vw: int
    size: int


@dataclass(frozen=True)
class Collected:
    """The result of a gather. The parts stand in the body one after the other."""

    cut: int
    ordinal: int
    parts: tuple[GatherPart, ...]


@dataclass(frozen=True)
class Report:
    """What a VW holds, from which lost servers can be rebuilt (L5).

    Attributes:
        era: of the last generation that it was a member of; 0 if of none.
        point: where its last pull was; ``None`` if it has none.
        clock: c_local; that of the pending update, if there is one.
        pending: whether it has an update that none of its pulls includes.
        cut, cut_clock: the last cut it has passed, and the clock there.
        cut_at: the clock at which VW 0 wants to cut, as far as it knows; -1 if it does not.
        collected: the last gather of which it has the result, whose parts come in the body.
    """

    era: int
    point: CommitIndex | None
    clock: int
    pending: bool
    cut: int
    cut_clock: int
    cut_at: int
    collected: Collected | None


NOTHING = Report(0, None, 0, False, 0, 0, -1, None)
"""The report of a VW that has just begun. Cut 0 is the start."""


# Requests to the coordinator.


@dataclass(frozen=True)
class Join:
    """``attempt`` grows with every new report; ``contents`` are what the shards hold, as ``Holding`` says."""

    vw: int
    incarnation: int
    attempt: int
    signature: TrainingSignature
    report: Report
    contents: tuple[str, ...]


@dataclass(frozen=True)
class Loaded:
    """All shards hold the weights that ``LoadNow`` asked for."""

    vw: int
    incarnation: int
    generation: str


@dataclass(frozen=True)
class Pushed:
    """All shards hold the update of ``clock``. ``cut``: VW 0 wants all to cut as soon as they can at one clock."""

    vw: int
    incarnation: int
    generation: str
    clock: int
    cut: bool


@dataclass(frozen=True)
class Pull:
    """Asks for a turn; a VW numbers its turns, upwards."""

    vw: int
    incarnation: int
    generation: str
    turn: int


@dataclass(frozen=True)
class Pulled:
    vw: int
    incarnation: int
    generation: str
    turn: int


@dataclass(frozen=True)
class Arrive:
    """The VW waits at ``cut``, having pushed what it had. ``admit``: those who want to join may do so there."""

    vw: int
    incarnation: int
    generation: str
    cut: int
    admit: bool


@dataclass(frozen=True)
class Gather:
    """The part of a gather, as the body. ``cut`` is the last one that the VW has passed; ``ordinal`` counts upwards."""

    vw: int
    incarnation: int
    generation: str
    cut: int
    ordinal: int


@dataclass(frozen=True)
class Fetch:
    """The result of a gather; asked for when ``Gathered`` has told its size."""

    vw: int
    incarnation: int
    generation: str
    cut: int
    ordinal: int


@dataclass(frozen=True)
class Heartbeat:
    vw: int
    incarnation: int
    generation: str


@dataclass(frozen=True)
class Leave:
    """The VW is done; or has failed, for a ``failure`` that the others are told and end with."""

    vw: int
    incarnation: int
    failure: str


@dataclass(frozen=True)
class AskStatus:
    """Anybody may ask; the answer is ``Status``."""


# Requests to a shard.


@dataclass(frozen=True)
class Hello:
    """Asks what the shard holds."""

    vw: int
    incarnation: int


@dataclass(frozen=True)
class Load:
    """Weights, as the body: all of ``parameters``, one after the other.

    They replace what the shard holds only if that is ``over``, so a request that comes late replaces nothing.
    """

    vw: int
    incarnation: int
    generation: str
    over: str
    included: tuple[UpdateId, ...]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class StageUpdate:
    """An update, as the body, to be kept until it is its turn to be added."""

    vw: int
    incarnation: int
    generation: str
    clock: int


@dataclass(frozen=True)
class Read:
    """Asks for the weights after ``tail``, the commits that follow the first ``start`` ones of the generation."""

    vw: int
    incarnation: int
    generation: str
    start: int
    tail: tuple[Commit, ...]


# Replies.


@dataclass(frozen=True)
class Departed:
    """A member that the others go on without, after ``clock`` waves of its; ``why`` is empty where it has left."""

    vw: int
    incarnation: int
    clock: int
    why: str


@dataclass(frozen=True)
class Done:
    """``departed``: the coordinator tells of all so far."""

    epoch: str
    departed: tuple[Departed, ...] = ()


@dataclass(frozen=True)
class NotYet:
    """Ask again. ``waits_for`` says for whom or what; ``missing`` are VWs that have to join before anybody can."""

    epoch: str
    waits_for: str
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Refused:
    epoch: str
    refusal: Refusal
    why: str


@dataclass(frozen=True)
class Failed:
    """A VW has failed: all end."""

    epoch: str
    vw: int
    failure: str


@dataclass(frozen=True)
class Lost:
    """Updates of a VW that nobody holds any more: ``first`` to ``last``. A ``last`` of -1 says that the coordinator was
    restarted, too, and cannot know whether there were any."""

    vw: int
    incarnation: int
    first: int
    last: int


@dataclass(frozen=True)
class Joined:
    """The VW is a member.

    Attributes:
        base: the point that the generation began with.
        clock: the VW's c_local, without its pending update unless ``base`` includes that.
        cut: the last one that somebody has passed.
        lost: what the servers that were lost took with them.
    """

    epoch: str
    generation: str
    base: CommitIndex
    clock: int
    cut: int
    lost: tuple[Lost, ...]


@dataclass(frozen=True)
class LoadNow:
    """The VW's weights are the newest that survive: it shall load them into all shards, over ``contents``."""

    epoch: str
    generation: str
    base: CommitIndex
    contents: tuple[str, ...]


@dataclass(frozen=True)
class Granted:
    """A turn: the shards may be read at ``point``, which is ``tail`` after ``start``.

    ``clock`` and ``slowest`` are c_local and c_global (the same, if everyone waits at a cut); ``cut_at`` the clock at
    which all shall cut, or -1.
    """

    epoch: str
    turn: int
    point: CommitIndex
    start: int
    tail: tuple[Commit, ...]
    clock: int
    slowest: int
    cut_at: int


@dataclass(frozen=True)
class Closed:
    """All have arrived at the cut; the clock is now the same everywhere."""

    epoch: str
    cut: int
    clock: int


@dataclass(frozen=True)
class Gathered:
    """The gather is complete. The parts come as the body of the answer to ``Fetch``."""

    epoch: str
    collected: Collected


@dataclass(frozen=True)
class Holding:
    """What a shard holds: its epoch if it is fresh, else the generation; and the last update that it has of the VW."""

    epoch: str
    content: str
    loaded: bool
    last: UpdateId | None


@dataclass(frozen=True)
class MemberStatus:
    vw: int
    incarnation: int
    clock: int
    waits_at: int
    """The cut; -1 if it does not wait at one."""
    silent_ms: int


@dataclass(frozen=True)
class Status:
    """``slowest`` is c_global, -1 if everyone waits at a cut; ``commits`` counts this generation's."""

    epoch: str
    phase: str
    generation: str
    slowest: int
    commits: int
    members: tuple[MemberStatus, ...]


Request = Join | Loaded | Pushed | Pull | Pulled | Arrive | Gather | Fetch | Heartbeat | Leave | AskStatus
"""What the coordinator answers."""
ShardRequest = Hello | Load | StageUpdate | Read
Answer = Done | NotYet | Refused | Failed | Joined | LoadNow | Granted | Closed | Gathered | Holding | Status
Message = Request | ShardRequest | Answer

CODEC = Codec((*Request.__args__, *ShardRequest.__args__, *Answer.__args__))
encode = CODEC.encode
decode = CODEC.decode
