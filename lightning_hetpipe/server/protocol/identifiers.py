"""Identifiers of updates and of positions in the commit log, and the faults of the protocol.

    VW                            coordinator                    shards (each server owns one)
    ---------------------------------------------------------------------------------------
    StageUpdate + bytes       ------------------------------->   keep it; whole or not at all
    Pushed                    ->  c_local = c + 1; the update
                                  gets its place in the log
    Pull                      ->  grant a *read lease*: commit
                                  index n, and the log's tail
    Read(n, tail)             ------------------------------->   add the tail's updates in its order, send weights
    Pulled                    ->  the read lease ends

One server is the coordinator. It alone decides clocks, members, leases and the order of commits, and it never calls a
shard. The log reaches the shards with the pulls: each carries the part that a shard may not know yet. So a push costs
no round trip between servers, and a shard adds an update when the first pull needs it.

**A pull is never torn.** It names one commit index. During its read lease nothing is committed after this index, so all
shards can be read at it, in place, without a copy. Read leases end with ``Pulled``, or with the VW's lease. While a
commit waits for read leases, no new read lease is granted, so neither starves. With D = 0 a commit never waits: a
wave's updates are complete only after the read leases of the wave before.

**Nothing is lost (L5).** Weights live in a *generation*. The coordinator begins a generation when all VWs have joined,
and again when a server was lost. A restarted server holds its *epoch*, a random id, instead of the generation. So VWs
notice the loss. Then every VW reports what it holds, and the newest surviving pull is loaded into all shards. VWs push
again, in VW order, the updates that this pull lacks. *Terms* count generations.

Every request can be repeated at any time: it is answered again, and acts once. No request blocks: without an answer
yet, the answer is ``NotYet``, with the reason, and the request is repeated. All times are arguments.

**An update stays unchanged until a pull of its own VW includes it.** So the VW can send it again, and a server on the
VW's host can add it from the VW's memory.

Bounds: a shard holds its weights and one update per VW, (1 + N) times its bytes (``shard``). A VW holds the weights of
its last pull, arriving weights and one update, three times the model's bytes (``client``). An update that a server adds
from the VW's memory exists once, and counts for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MOST_VIRTUAL_WORKERS = 1000
"""Largest number of VWs of a run. A coordinator's memory and answers grow with it, and anybody may claim a number."""

COORDINATOR = 0
"""Index of the coordinator in the list of servers. The coordinator also has a shard."""


class Refusal(Enum):
    """Reason for refusing a request, from which its sender knows how to go on."""

    MALFORMED = "malformed"
    """No message of this protocol, or a message that makes no sense now. The sender is at fault."""
    SIGNATURE = "signature"
    """The VW has another training signature than the other VWs. It must end."""
    FENCED = "fenced"
    """A newer incarnation of this VW has joined. The older process must end."""
    LEFT_OUT = "left_out"
    """The VW's lease ran out, and the other VWs went on. It must join again as a new incarnation."""
    GENERATION = "generation"
    """The server does not hold this generation: a server was lost. The VW must join again with what it holds."""
    STALE = "stale"
    """A later request of this VW has overtaken the request. Nobody waits for its answer any more."""
    TOO_LARGE = "too_large"
    """More bytes than the server accepts."""
    BUSY = "busy"
    """The same bytes are still arriving in an earlier request. Ask again."""
    FAILED = "failed"
    """Another VW has failed. All must end."""
    NOT_FINITE = "not_finite"
    """An update holds a NaN or infinity. Nothing was added."""


class LocalFault(Exception):
    """Request of a caller in this process that the state does not allow."""


class RemoteFault(Exception):
    """Refused request, or impossible answer, for the reason ``refusal``."""

    def __init__(self, refusal: Refusal, why: str) -> None:
        super().__init__(why)
        self.refusal = refusal

    @property
    def text(self) -> str:
        """The fault as the transport's text, which ``parse`` reads."""
        return f"{self.refusal.value}: {self}"

    @staticmethod
    def parse(text: str) -> RemoteFault:
        name, _, why = text.partition(": ")
        known = {each.value: each for each in Refusal}
        return RemoteFault(known[name], why) if name in known else RemoteFault(Refusal.MALFORMED, text)


class PeerFailed(Exception):
    """Failure of another VW, with which all VWs must end. The message has its number and reason."""


class FirstLost(PeerFailed):
    """End of VW 0's process without a message. VW 0 may be started again, and so may other VWs of its machine."""

    def __init__(self) -> None:
        super().__init__("VW 0 is lost: its process has ended")


@dataclass(frozen=True, order=True)
class UpdateId:
    """Identifier of an update. The updates of a VW are added in this order. A clock of -1 means no update."""

    vw: int
    incarnation: int
    clock: int


@dataclass(frozen=True)
class Commit:
    """Entry of the commit log: add ``update`` divided by ``divisor`` (1 unless aggregate="mean")."""

    update: UpdateId
    divisor: int


@dataclass(frozen=True)
class CommitIndex:
    """Position in the commit log after ``count`` updates since the run's start.

    Attributes:
        term: Number of the generation. The newest surviving position has the largest (term, count).
        included: Last included update of each VW.
        members: The members at this position, with their incarnations. Their clocks are not used (-1).
    """

    term: int
    count: int
    included: tuple[UpdateId, ...]
    members: tuple[UpdateId, ...]

    def includes(self, update: UpdateId) -> bool:
        return any(last.vw == update.vw and last >= update for last in self.included)

    @property
    def age(self) -> tuple[int, int]:
        return self.term, self.count
