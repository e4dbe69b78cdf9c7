"""Identifiers of updates and of positions in the commit log, and the faults of the protocol.

    VW                            coordinator                    shards (each server owns one)
    ---------------------------------------------------------------------------------------
    StageUpdate + bytes       ------------------------------->   keep it; whole or not at all
    Pushed                    ->  c_local = c + 1; the update
                                  gets its place in the log
    Pull                      ->  grant a *read lease*: commit
                                  index n, and the log's tail
    Read(n, tail)             ------------------------------->   add what the tail says, in its order, send weights
    Pulled                    ->  the read lease ends

One server is the coordinator, and it alone decides: clocks, members, leases, the order of commits. It never talks to a
shard. The log reaches the shards with the pulls, each of which carries the part that a shard may not know yet. So a
push costs no round trip between servers, and a shard adds an update when the first pull needs it.

**A pull is never torn.** It names one commit index, and during its read lease nothing is committed behind that; so all
shards can be read at it, in place, without a copy. Read leases end with ``Pulled``, or with the VW's lease. While a
commit waits for read leases no new one is granted, so neither starves. With D = 0 nobody ever waits for that: a wave's
updates can only all be there when the read leases of the wave before are over.

**Nothing is lost (L5).** Weights live in a *generation*: the coordinator begins one when all VWs have joined, and again
when a server was lost, which a VW notices because a server does not know the generation any more (a server that has
just started holds its *epoch*, a random id, instead). Then every VW reports what it holds, the newest surviving pull is
loaded into all shards, and the VWs push again, in VW order, what that pull lacks. *Terms* count generations.

Every request can be repeated at any time: it is answered again, and acts once. None blocks: a request that cannot be
answered yet is answered ``NotYet``, with the reason, and repeated. All times are arguments.

**An update stays unchanged until a pull of its own VW includes it**, so that the VW can send it again, and a server on
its host can add it from where the VW wrote it.

Bounds: a shard holds its weights and one update per VW, (1 + N) times its bytes (``shard``); a VW holds the weights of
its last pull, those that are arriving and one update, three times the model's bytes (``client``). An update that a
server adds from the VW's memory exists once, and counts for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

MOST_VIRTUAL_WORKERS = 1000
"""Largest number of VWs of a run: memory and answers of a coordinator grow with it, and anybody may claim a number."""

COORDINATOR = 0
"""Index of the coordinator in the list of servers; it owns a shard as well."""


class Refusal(Enum):
    """Reason for refusing a request, which tells its sender what to do."""

    MALFORMED = "malformed"
    """Not a message of this protocol, or one that makes no sense now. The sender is at fault."""
    SIGNATURE = "signature"
    """The VW trains something else than the others. It must end."""
    FENCED = "fenced"
    """A newer incarnation of this VW has joined. The older one must end."""
    LEFT_OUT = "left_out"
    """The VW's lease ran out, and the others went on without it. It must join again, as a new incarnation."""
    GENERATION = "generation"
    """The server does not hold that generation: a server was lost. The VW must join again with what it holds."""
    STALE = "stale"
    """The request was overtaken by a later one of the same VW. Nobody waits for its answer any more."""
    TOO_LARGE = "too_large"
    """More bytes than the server accepts."""
    BUSY = "busy"
    """The same bytes are still arriving in an earlier request. Ask again."""
    FAILED = "failed"
    """Another VW has failed. All must end."""
    NOT_FINITE = "not_finite"
    """An update holds a NaN or infinity. Nothing was added."""


class Fault(Exception):
    """A violation of the protocol."""


class LocalFault(Fault):
    """A request of the caller, in this process, that the state does not allow."""


class RemoteFault(Fault):
    """A request that was refused, or an answer that cannot be: ``refusal`` says why."""

    def __init__(self, refusal: Refusal, why: str) -> None:
        super().__init__(why)
        self.refusal = refusal

    @property
    def text(self) -> str:
        """The fault as text, as the transport carries it; ``parse`` reads it."""
        return f"{self.refusal.value}: {self}"

    @staticmethod
    def parse(text: str) -> RemoteFault:
        name, _, why = text.partition(": ")
        known = {each.value: each for each in Refusal}
        return RemoteFault(known[name], why) if name in known else RemoteFault(Refusal.MALFORMED, text)


class PeerFailed(Exception):
    """Another VW has failed, and all must end; the message says which, and why."""


class FirstLost(PeerFailed):
    """The process of VW 0 has ended without a word; others of its machine may be started again, as it may be."""

    def __init__(self) -> None:
        super().__init__("VW 0 is lost: its process has ended")


@dataclass(frozen=True, order=True)
class UpdateId:
    """Identifier of an update; the updates of a VW are added in this order. A clock of -1 stands for none."""

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
    """Position in the commit log: after ``count`` updates since the run's start.

    Attributes:
        term: counts generations; of all surviving positions, the newest has the largest (term, count).
        included: of each VW of which something was added, the last update.
        members: the members then, each with the incarnation; their clocks are not used (-1).
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


def with_commits(included: Iterable[UpdateId], commits: Sequence[Commit]) -> tuple[UpdateId, ...]:
    """Return ``included`` as it is after ``commits``."""
    last = {update.vw: update for update in included}
    last.update((commit.update.vw, commit.update) for commit in commits)
    return tuple(last[vw] for vw in sorted(last))
