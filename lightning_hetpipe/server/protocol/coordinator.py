"""The coordinator: membership and leases, and one generation of weights after the other. Pure: time is an argument.

    phase     goes to    when
    --------------------------------------------------------------------------------------------------------------
    FORMING   LOADING    the VWs have reported what they hold (``forming`` says whose reports are needed)
    LOADING   RUNNING    the holder of the newest weights has loaded them into all shards
    LOADING   FORMING    the holder is gone, or a VW joins with a new report (a server was lost, again)
    RUNNING   FORMING    a member joins with a new report: a server was lost; or all are gone, and others come
    any       FAILED     a VW has failed: everybody is told, and ends

Every message of a VW renews its lease; a VW that is silent for longer is no member any more (``leases``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from lightning_hetpipe.server.protocol.commit_log import CommitLog, status_of
from lightning_hetpipe.server.protocol.deadlock import DeadlockDetector
from lightning_hetpipe.server.protocol.decisions import GenerationBegan, Note, ignore
from lightning_hetpipe.server.protocol.gathers import LIMIT, Gathers
from lightning_hetpipe.server.protocol.identifiers import Refusal, RemoteFault
from lightning_hetpipe.server.protocol.leases import Leases
from lightning_hetpipe.server.protocol.messages import (
    Answer,
    Arrive,
    AskStatus,
    Closed,
    Departed,
    Done,
    Failed,
    Fetch,
    Gather,
    Gathered,
    Granted,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Loaded,
    LoadNow,
    NotYet,
    Pull,
    Pulled,
    Pushed,
    Refused,
    Request,
    Status,
    TrainingSignature,
)
from lightning_hetpipe.server.protocol.recovery import Recovery, check, decide
from lightning_hetpipe.server.protocol.signature import difference

MAX_FAILURE = 4000
"""Characters of a failure's reason that are passed on."""


class Phase(Enum):
    FORMING = "forming"
    LOADING = "loading"
    RUNNING = "running"
    FAILED = "failed"


class Coordinator:
    """
    Args:
        epoch: the server's.
        lease: seconds of silence after which a VW is left out.
        gather_limit: bytes that a VW may give to a gather.
        gone: incarnations of VWs that were left out, or have left, before this coordinator took over. Older ones than
            those are gone as well.
        note: told every decision about weights.
    """

    def __init__(
        self,
        epoch: str,
        lease: float,
        gather_limit: int = LIMIT,
        gone: Mapping[int, int] | None = None,
        note: Note = ignore,
    ) -> None:
        self.epoch = epoch
        self.phase = Phase.FORMING
        self.order: CommitLog | None = None
        """Of the running generation; while another one is formed, of the one that ended."""
        self.generation = ""
        self._leases = Leases(lease)
        self._note = note
        self._gathers = Gathers(gather_limit)
        self._signature: TrainingSignature | None = None
        self._incarnation: dict[int, int] = {}
        """The newest of each VW that has been heard of."""
        self.gone: dict[int, int] = dict(gone or {})
        """Incarnations that were left out, or have left."""
        self._departed: dict[tuple[int, int], Departed] = {}
        """Those of them that were members, by VW and incarnation."""
        self._joins: dict[int, Join] = {}
        """What was reported for the generation to come."""
        self._newcomers: dict[int, Join] = {}
        """Who waits for a cut to join at."""
        self._attempts: dict[int, int] = {}
        """The reports with which the members became members."""
        self._reports: dict[int, int] = {}
        """The last report of each VW."""
        self._formation: Recovery | None = None
        self._lost_at: float | None = None
        self._failure: tuple[int, str] | None = None
        self._failed_at = 0.0
        self._forgotten = False
        self._admits: set[int] = set()
        self._standstill = DeadlockDetector()

    @property
    def unused(self) -> bool:
        """Whether no VW has come."""
        return not self._incarnation

    @property
    def finished(self) -> bool:
        """Whether there were VWs, and all are gone. After a failure those who come late are told for one lease."""
        if self.unused or self._leases.seen:
            return False
        number = 0 if self._signature is None else self._signature.virtual_workers
        return self._failure is None or self._forgotten or len(self._incarnation) >= number

    def next_expiry(self) -> float | None:
        """When the next lease runs out, if nothing is heard until then."""
        times = self._leases.ends()
        if self.phase is Phase.FORMING and self._lost_at is not None:
            times.append(self._lost_at + self._leases.seconds)
        return min(times, default=None)

    def tick(self, now: float) -> None:
        """Leases run out."""
        for vw in self._leases.expired(now):
            self._remove(vw, self._silent)
        if self.phase is Phase.FORMING:
            self._form(now)
        self._forgotten = self._failure is not None and now - self._failed_at > self._leases.seconds

    def check(self, message: Request, size: int) -> None:
        """Refuses a body before it is taken."""
        if isinstance(message, Gather):
            self._gathers.check(size)
        elif isinstance(message, Join):
            collected = message.report.collected
            if size != (sum(part.size for part in collected.parts) if collected else 0):
                raise RemoteFault(Refusal.MALFORMED, f"{size} bytes do not come with such a Join")
            self._gathers.check(size // max(1, message.signature.virtual_workers))
        elif size:
            raise RemoteFault(Refusal.MALFORMED, f"{size} bytes do not come with a {type(message).__name__}")

    def handle(
        self, message: Request, now: float, body: bytes = b"", *, again: bool = False
    ) -> tuple[Answer, Sequence[bytes]]:
        """The answer, and its body. ``again``: the same request is tried once more, and is no sign of life."""
        if not again:
            excess = self._leases.hear(now)
            self._lost_at = None if self._lost_at is None else self._lost_at + excess
        self.tick(now)
        try:
            if isinstance(message, AskStatus):
                return self._status(now), ()
            self.check(message, len(body))
            self._identify(message, now, again)
            if self._failure is not None and not isinstance(message, Leave):
                return Failed(self.epoch, *self._failure), ()
            if isinstance(message, Join):
                return self._join(message, body, now), ()
            if isinstance(message, Leave):
                return self._leave(message, now), ()
            answer, parts = self._serve(message, body)
            members = self.order.clock if self.order is not None and self.phase is Phase.RUNNING else ()
            why = self._standstill.after(message.vw, message, answer, members, self._serve)
            if why is not None:
                self._fail(message.vw, why, now)
            return answer, parts
        except RemoteFault as fault:
            return Refused(self.epoch, fault.refusal, str(fault)), ()

    # Who is there.

    def _identify(self, message: Request, now: float, again: bool) -> None:
        assert not isinstance(message, AskStatus)
        vw, incarnation = message.vw, message.incarnation
        if isinstance(message, Join):
            check(message)
            first = self._signature or message.signature
            if (what := difference(first, message.signature)) is not None:
                raise RemoteFault(Refusal.SIGNATURE, f"VW {vw} differs from the VW that came first: {what}")
            self._signature = first
        if vw < 0 or (self._signature is not None and vw >= self._signature.virtual_workers):
            raise RemoteFault(Refusal.MALFORMED, f"there is no VW {vw}")
        known = self._incarnation.get(vw, -1)
        if incarnation < known:
            raise RemoteFault(Refusal.FENCED, f"VW {vw} was started again, and this is the older one")
        if incarnation <= self.gone.get(vw, -1) and not isinstance(message, Leave):
            raise RemoteFault(Refusal.LEFT_OUT, f"VW {vw} was {self._silent}, or has left")
        if incarnation > known:
            if not isinstance(message, Join | Leave):
                if vw not in self._leases.seen and self._signature is not None:
                    self._incarnation[vw], self._leases.seen[vw] = incarnation, now  # it will join when it can
                raise RemoteFault(Refusal.GENERATION, f"VW {vw} is not known here, and has to join")
            if vw in self._leases.seen:
                self._remove(vw, "started again")
            self._incarnation[vw] = incarnation
            self._reports.pop(vw, None)
        if not again and not isinstance(message, Leave):
            self._leases.seen[vw] = now

    @property
    def _silent(self) -> str:
        lease = f"{self._leases.seconds:g} s"
        return f"silent for longer than its lease of {lease} (raise WSPCallback(lease=...) if it may be)"

    def _remove(self, vw: int, why: str = "") -> None:
        """The VW is gone: it has left; or it was left out, and ``why``."""
        del self._leases.seen[vw]
        self._standstill.forget(vw)
        self._joins.pop(vw, None)
        self._newcomers.pop(vw, None)
        member = self._attempts.pop(vw, None) is not None
        if not member:
            return
        self.gone[vw] = self._incarnation[vw]
        clocks = self.order.clock if self.order is not None else {}
        assert self._formation is not None
        self._depart(vw, clocks[vw] if vw in clocks else self._formation.members[vw].clock, why)
        if self.phase is Phase.RUNNING and self.order is not None:
            self.order.drop(vw, why)
            self._admit()
        elif self.phase is Phase.LOADING and self._formation is not None and self._formation.holder == vw:
            self.phase = Phase.FORMING

    def _depart(self, vw: int, clock: int, why: str) -> None:
        key = vw, self.gone[vw]
        self._departed.setdefault(key, Departed(*key, clock, why))

    def _done(self) -> Done:
        return Done(self.epoch, tuple(self._departed.values()))

    def _fail(self, vw: int, why: str, now: float) -> None:
        self._failure, self._failed_at, self.phase = (vw, why[:MAX_FAILURE]), now, Phase.FAILED

    def _leave(self, message: Leave, now: float) -> Answer:
        left_out = message.incarnation <= self.gone.get(message.vw, -1)  # what befalls it is no matter of the others'
        if message.failure and self._failure is None and not left_out:
            self._fail(message.vw, message.failure, now)
        if message.vw in self._leases.seen:
            self._remove(message.vw)
        self.gone[message.vw] = message.incarnation
        return self._done()

    # How a generation begins.

    def _join(self, message: Join, body: bytes, now: float) -> Answer:
        vw = message.vw
        if message.attempt < self._reports.get(vw, 0):
            raise RemoteFault(Refusal.STALE, f"VW {vw} has joined again since")
        self._reports[vw] = message.attempt
        if self.phase is Phase.RUNNING and self.order is not None and not self.order.clock:
            self._newcomers.clear()  # they ask again
            self.phase, self.order = Phase.FORMING, None
        if self.phase is not Phase.FORMING and vw in self._attempts:
            if message.attempt == self._attempts[vw]:
                return self._joined(vw)
            if self.phase is Phase.RUNNING:
                self._joins.clear()
                self._attempts.clear()
                self._lost_at = None
            self.phase = Phase.FORMING
        if self.phase is not Phase.FORMING:
            if message.report.point is not None:
                raise RemoteFault(Refusal.LEFT_OUT, f"the others have gone on without VW {vw}")
            self._newcomers[vw] = message
            return NotYet(self.epoch, "a cut at which VWs may join")
        if message.report.collected is not None:
            self._gathers.restore(message.report.collected, body)
        self._joins[vw] = message
        if message.report.point is not None and self._lost_at is None:
            self._lost_at = now
        missing = self._form(now)
        if missing:
            return NotYet(self.epoch, f"VW {', '.join(map(str, missing))} to join", tuple(missing))
        if vw not in self._attempts:
            return self._join(message, body, now)
        return self._joined(vw)

    def _form(self, now: float) -> list[int]:
        if not self._joins:
            return []
        waited = self._lost_at is not None and now - self._lost_at > self._leases.seconds
        era = self.order.base.era if self.order is not None else 0
        if self._formation is not None:
            era = max(era, self._formation.base.era)
        found = decide(self._joins, self._leases.seen, self.gone, self.order, era, waited)
        if isinstance(found, list):
            return found
        if all(join.report.collected is None for join in self._joins.values()):
            self._gathers = Gathers(self._gathers.limit)  # what is left there is another launch's, or given anew
        assert self._signature is not None
        for each in found.missing if self._signature.parameters else ():  # from other rooms it may have gone by itself
            if self.gone.get(each.vw, -1) < each.incarnation:
                self.gone[each.vw] = each.incarnation
                self._depart(each.vw, each.clock, self._silent)
        self._formation = found
        self._attempts = {vw: self._joins[vw].attempt for vw in found.members}
        for vw in [vw for vw in self._joins if vw not in found.members]:
            if (join := self._joins.pop(vw)).report.point is None:
                self._newcomers[vw] = join
        self.generation = f"{self.epoch}.{found.base.era}"
        self.phase = Phase.LOADING
        return []

    def _joined(self, vw: int) -> Answer:
        found = self._formation
        assert found is not None
        if self.phase is Phase.RUNNING:
            assert self.order is not None
            standing = found.members.get(vw)
            was_there = standing is not None and standing.incarnation == self._incarnation[vw]
            clock = standing.clock if standing is not None and was_there else self.order.clock[vw]
            return Joined(self.epoch, self.generation, found.base, clock, self.order.cut, found.lost)
        if vw == found.holder:
            return LoadNow(self.epoch, self.generation, found.base, self._joins[vw].contents)
        return NotYet(self.epoch, f"VW {found.holder} to load the weights")

    def _loaded(self, message: Loaded) -> None:
        if self.phase is not Phase.LOADING:
            return
        found, signature = self._formation, self._signature
        assert found is not None
        assert signature is not None
        if message.vw != found.holder:
            raise RemoteFault(Refusal.MALFORMED, f"VW {message.vw} was not asked to load weights")
        members = tuple((vw, each.incarnation, each.clock) for vw, each in sorted(found.members.items()))
        self._note(GenerationBegan(found.base.era, found.base.count, members))
        self.order = CommitLog(
            found.base,
            found.members,
            signature.clock_distance,
            mean=signature.aggregate == "mean",
            cut=found.cut,
            cut_clock=found.cut_clock,
            cut_at=found.cut_at,
            note=self._note,
        )
        self._joins.clear()
        self._lost_at = None
        self.phase = Phase.RUNNING
        for vw in [vw for vw in found.members if vw not in self._attempts]:  # gone while the weights were loaded
            self.order.drop(vw)

    def _admit(self) -> None:
        """Newcomers join where a cut has just closed that lets them."""
        assert self.order is not None
        if self._newcomers and self.order.cut in self._admits:
            self.order.admit({vw: join.incarnation for vw, join in self._newcomers.items()})
            self._attempts.update({vw: join.attempt for vw, join in self._newcomers.items()})
            self._newcomers.clear()
        self._admits = {cut for cut in self._admits if cut > self.order.cut}

    # While it runs.

    def _serve(
        self, message: Loaded | Pushed | Pull | Pulled | Arrive | Gather | Fetch | Heartbeat, body: bytes
    ) -> tuple[Answer, Sequence[bytes]]:
        if message.generation != self.generation or self.phase is Phase.FORMING:
            raise RemoteFault(Refusal.GENERATION, "a server was lost; the VW has to join again")
        if message.vw not in self._attempts:
            raise RemoteFault(Refusal.LEFT_OUT, f"VW {message.vw} is not a member")
        if isinstance(message, Loaded):
            self._loaded(message)
        order, vw = self.order, message.vw
        if isinstance(message, Heartbeat | Loaded):
            if isinstance(message, Heartbeat) and self.phase is Phase.RUNNING and order is not None:
                order.confirm(vw)
            return self._done(), ()
        if self.phase is not Phase.RUNNING or order is None:
            raise RemoteFault(Refusal.GENERATION, "the weights are still being loaded")
        order.confirm(vw)
        if isinstance(message, Pushed):
            order.push(vw, message.clock, message.cut)
        elif isinstance(message, Pulled):
            order.pulled(vw, message.turn)
        elif isinstance(message, Pull):
            why = order.pull(vw, message.turn)  # by which it has its turn, or has to wait
            return self._granted(order, message) if why is None else NotYet(self.epoch, why), ()
        elif isinstance(message, Arrive):
            return self._arrive(order, message), ()
        elif isinstance(message, Gather | Fetch):
            return self._gather(order, message, body)
        self._admit()
        return self._done(), ()

    def _granted(self, order: CommitLog, message: Pull) -> Granted:
        clock = order.clock[message.vw]
        slowest = clock if order.slowest is None else order.slowest
        return Granted(
            self.epoch, message.turn, order.head, order.start, tuple(order.tail), clock, slowest, order.cut_at
        )

    def _arrive(self, order: CommitLog, message: Arrive) -> Answer:
        if message.admit and message.cut > order.cut:
            self._admits.add(message.cut)
        clock = order.arrive(message.vw, message.cut)
        self._admit()
        if clock is not None:
            return Closed(self.epoch, message.cut, clock)
        late = [vw for vw in sorted(order.clock) if vw not in order.waits]
        return NotYet(self.epoch, f"VW {', '.join(map(str, late))} to come to cut {message.cut}")

    def _gather(self, order: CommitLog, message: Gather | Fetch, body: bytes) -> tuple[Answer, Sequence[bytes]]:
        name = (message.cut, message.ordinal)
        if isinstance(message, Fetch):
            collected, parts = self._gathers.result(name)
            return Gathered(self.epoch, collected), parts
        self._gathers.give(message.vw, name, body, order.clock.keys(), order.waits)
        if missing := self._gathers.missing(name, order.clock.keys(), order.waits):
            return NotYet(self.epoch, f"VW {', '.join(map(str, missing))} in gather {name}"), ()
        return Gathered(self.epoch, self._gathers.result(name)[0]), ()

    def _status(self, now: float) -> Status:
        order = self.order if self.phase is Phase.RUNNING else None
        silent = {vw: now - seen for vw, seen in self._leases.seen.items()}
        return status_of(self.epoch, self.phase.value, self.generation, order, self._incarnation, silent)
