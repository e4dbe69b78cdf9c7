"""What servers and virtual workers (VWs) agree on: names for updates and for points of the commit order, and faults.

    VW                         coordinator                    shards (each server owns one)
    ---------------------------------------------------------------------------------------
    Stage(update) + bytes  ------------------------------->   keep it; whole or not at all
    Pushed(update)         ->  c_local = c + 1; it gets its
                               place in the commit order
    Pull                   ->  grant a *turn*: point n of the
                               order, and the order's tail
    Read(n, tail)          ------------------------------->   add what the tail says, in its order, send weights
    Pulled                 ->  the turn ends

One server is the coordinator, and it alone decides: clocks, members, leases, the order of commits. It never talks to a
shard. The order reaches the shards with the pulls, each of which carries the part that a shard may not know yet, so a
push costs no round trip between servers, and a shard adds an update when the first pull needs it.

**A pull is never torn.** It names one point, and while it runs (its turn) nothing is committed behind that point; so
all shards can be read at it, in place, without a copy. Turns end with ``Pulled``, or with the VW's lease. While a
commit waits for turns no new one is granted, so neither starves. With D = 0 nobody ever waits for that: a wave's
updates can only all be there when the turns of the wave before are over.

**Nothing is lost (L5).** Weights live in a *generation*: the coordinator begins one when all VWs have joined, and again
when a server was lost, which a VW notices because a server answers with another *epoch* (the random id of its start)
or does not know the generation. Then every VW reports what it holds, the newest surviving pull is loaded into all
shards, and the VWs push again, in VW order, what that pull lacks.

Every request can be repeated at any time: it is answered again, and acts once. None blocks: what cannot be answered yet
is answered ``NotYet``, with the reason, and asked again. All times are arguments.

**An update stays as it is until a pull of its VW's own includes it**, so that the VW can send it again, and a server on
its host can add it from where the VW wrote it.

Bounds: a shard holds its weights and one update per VW, (1 + N) times its bytes (``shard``); a VW holds the weights of
its last pull, those that are arriving and one update, three times the model's bytes (``client``). An update that a
server adds from the VW's memory exists once, and counts for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

COORDINATOR = 0
"""The server, in the list of servers, that is the coordinator; it owns a shard as well."""


class Refusal(Enum):
    """Why a request is refused, and so what its sender has to do."""

    MALFORMED = "malformed"
    """It is no message of this protocol, or makes no sense now. Its sender is at fault."""
    SIGNATURE = "signature"
    """The VW trains something else than the others. It must end."""
    FENCED = "fenced"
    """A newer incarnation of this VW has joined. The older one must end."""
    LEFT_OUT = "left_out"
    """The VW's lease ran out, and the others went on without it. It must join anew, as a new incarnation."""
    GENERATION = "generation"
    """The server does not hold that generation: a server was lost. The VW must join again with what it holds."""
    STALE = "stale"
    """The request was overtaken by a later one of the same VW. Whoever waits for its answer no longer needs it."""
    TOO_LARGE = "too_large"
    """More bytes than the server is prepared to keep."""
    BUSY = "busy"
    """The same bytes are still arriving in an earlier request. Ask again."""
    FAILED = "failed"
    """Another VW has failed. All must end."""
    NOT_FINITE = "not_finite"
    """An update holds a NaN or infinity. Nothing was added."""


class Fault(Exception):
    """A rule of the protocol was broken."""


class LocalFault(Fault):
    """The caller, in this process, broke it: a request that the state does not allow."""


class RemoteFault(Fault):
    """The peer broke it, or asked for what cannot be: ``refusal`` says which."""

    def __init__(self, refusal: Refusal, why: str) -> None:
        super().__init__(why)
        self.refusal = refusal

    @property
    def sentence(self) -> str:
        """All of it as text, where a transport carries nothing else; ``parse`` reads it."""
        return f"{self.refusal.value}: {self}"

    @staticmethod
    def parse(sentence: str) -> RemoteFault:
        name, _, why = sentence.partition(": ")
        known = {each.value: each for each in Refusal}
        return RemoteFault(known[name], why) if name in known else RemoteFault(Refusal.MALFORMED, sentence)


class PeerFailed(Exception):
    """Another VW has failed, and all must end: it says which, and why."""


@dataclass(frozen=True, order=True)
class UpdateId:
    """An update's name, and the last one of a VW: (VW, incarnation, clock). A VW's are added in this order.

    A clock of -1 stands for none.
    """

    vw: int
    incarnation: int
    clock: int


@dataclass(frozen=True)
class Commit:
    """One entry of the commit order: add ``update`` divided by ``divisor`` (1 unless aggregate="mean")."""

    update: UpdateId
    divisor: int


@dataclass(frozen=True)
class CommitIndex:
    """A point of the commit order: after ``count`` updates since the run's start, in the history ``era``.

    Attributes:
        era: counts generations; after a rebuild the newest surviving point has the largest (era, count).
        included: of each VW of which something was added, the last update.
        members: who was live there, each with the incarnation; their clocks are not used (-1).
    """

    era: int
    count: int
    included: tuple[UpdateId, ...]
    members: tuple[UpdateId, ...]

    def includes(self, update: UpdateId) -> bool:
        return any(last.vw == update.vw and last >= update for last in self.included)

    @property
    def age(self) -> tuple[int, int]:
        return self.era, self.count


def with_commits(included: Iterable[UpdateId], commits: Sequence[Commit]) -> tuple[UpdateId, ...]:
    """``included``, after ``commits`` too."""
    last = {mark.vw: mark for mark in included}
    last.update((commit.update.vw, commit.update) for commit in commits)
    return tuple(last[vw] for vw in sorted(last))
