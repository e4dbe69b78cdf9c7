"""Coordinator: membership, leases and one generation of weights after the other. Pure: time is an argument.

    phase     goes to    when
    --------------------------------------------------------------------------------------------------------------
    JOINING   LOADING    the VWs have reported what they hold (``recovery`` says whose reports are needed)
    LOADING   RUNNING    the holder of the newest weights has loaded them into all shards
    LOADING   JOINING    the holder is gone, or a VW joins with a new report (a server was lost, again)
    RUNNING   JOINING    a member joins with a new report (a server was lost), or all are gone and new VWs come
    any       FAILED     a VW has failed: all VWs are informed, and end

Every message of a VW renews its lease. A VW that is silent for longer is no member any more (``roster``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from lightning_hetpipe.server.protocol import messages
from lightning_hetpipe.server.protocol.commit_log import CommitLog, GenerationBegan, Note, Recovery, ignore
from lightning_hetpipe.server.protocol.gathers import Bytes, Gathers, KeptBytes
from lightning_hetpipe.server.protocol.identifiers import MOST_VIRTUAL_WORKERS, Refusal, RemoteFault
from lightning_hetpipe.server.protocol.messages import Answer, Request
from lightning_hetpipe.server.protocol.recovery import decide, newest_pull
from lightning_hetpipe.server.protocol.roster import DeadlockDetector, Leases, Roster

MAX_FAILURE = 4000
"""Largest number of characters of a failure's reason that are passed on."""


class Phase(Enum):
    JOINING = "joining"
    LOADING = "loading"
    RUNNING = "running"
    FAILED = "failed"


class Coordinator:
    """State machine that answers the VWs' requests.

    Args:
        epoch: Random id of the server's start.
        lease: Seconds of silence after which a VW is left out.
        gone: Last incarnation of each VW that had left or was left out before this coordinator took over.
        note: Receives every decision about weights.
    """

    def __init__(self, epoch: str, lease: float, gone: Mapping[int, int] | None = None, note: Note = ignore) -> None:
        self.epoch = epoch
        self.phase = Phase.JOINING
        self.log: CommitLog | None = None
        """Commit log of the running generation. After its end, its log is kept until the next generation runs."""
        self.generation = ""
        self._leases = Leases(lease)
        self._roster = Roster(self._leases, gone or {}, self._replace)
        self._note = note
        self._gathers = Gathers()
        self._kept = KeptBytes()
        self._joins: dict[int, messages.Join] = {}
        """Reports for the next generation."""
        self._newcomers: dict[int, messages.Join] = {}
        """VWs that wait for a cut at which they may join."""
        self._came: dict[int, float] = {}
        """Times of the VWs' first requests to join a running session without weights."""
        self._attempts: dict[int, int] = {}
        """Numbers of the reports with which the members became members."""
        self._reports: dict[int, int] = {}
        """Number of the last report of each VW."""
        self._recovery: Recovery | None = None
        self._lost_at: float | None = None
        """Time of the first report of a generation that has ended."""
        self._failure = ""
        self._forgotten_at = 0.0
        """Time from which VWs that come after a failure need not hear of it any more."""
        self._admits: set[int] = set()
        """Cuts at which newcomers become members."""
        self._deadlocks = DeadlockDetector()

    @property
    def _running(self) -> CommitLog | None:
        """Commit log of the running generation, or None."""
        return self.log if self.phase is Phase.RUNNING else None

    @property
    def unused(self) -> bool:
        """True if no VW has come yet."""
        return not self._roster.incarnation

    @property
    def gone(self) -> Mapping[int, int]:
        """Last incarnation of each VW that has left or was left out."""
        return self._roster.gone

    def finished(self, now: float) -> bool:
        """Return True if VWs have come, and all are gone. After a failure, late VWs are informed for one lease."""
        self.tick(now)
        if self.unused or self._leases.seen:
            return False
        number = 0 if self._roster.signature is None else self._roster.signature.virtual_workers
        return not self._failure or now > self._forgotten_at or len(self._roster.incarnation) >= number

    def next_expiry(self) -> float | None:
        """Return the time of the next change if no VW is heard until then."""
        times = [seen + self._leases.seconds for seen in self._leases.seen.values()]
        if self.phase is Phase.JOINING and self._lost_at is not None:
            times.append(self._lost_at + self._leases.seconds)
        return min(times, default=None)

    def tick(self, now: float) -> None:
        """Leave out the VWs whose leases have run out."""
        for vw in self._leases.expired(now):
            self._remove(vw, self._roster.silent)
        if self.phase is Phase.JOINING:
            self._recover(now)

    def check(self, message: Request, size: int, now: float) -> None:
        """Refuse a body before memory is taken for it. Only a member may send a body of any size."""
        if isinstance(message, messages.Gather):
            self._gathers.check(size)
        elif isinstance(message, messages.Join):
            claimed, gathered = message.signature.virtual_workers, message.report.gathered
            if not 1 <= claimed <= MOST_VIRTUAL_WORKERS:
                why = f"virtual_workers={claimed} are not from 1 to {MOST_VIRTUAL_WORKERS}; start fewer"
                raise RemoteFault(Refusal.MALFORMED, why)
            if size != (gathered.size if gathered else 0):
                raise RemoteFault(Refusal.MALFORMED, f"{size} bytes do not come with such a Join")
            self._gathers.check(size // claimed)
        elif size and isinstance(message, messages.KeepBytes):
            self._roster.identify(message, now, again=True)
        elif size:
            raise RemoteFault(Refusal.MALFORMED, f"{size} bytes do not come with a {type(message).__name__}")

    def handle(
        self, message: Request, now: float, body: Bytes = b"", *, again: bool = False
    ) -> tuple[Answer, Sequence[Bytes]]:
        """Return the answer and its body, or raise RemoteFault to refuse the request. A request that is tried ``again``
        is no sign of life."""
        if not again:
            excess = self._leases.hear(now)
            self._lost_at = None if self._lost_at is None else self._lost_at + excess
        self.tick(now)
        self.check(message, len(body), now)
        self._roster.identify(message, now, again)
        if isinstance(message, messages.Leave):
            return self._leave(message, now), ()
        if self._failure:
            raise RemoteFault(Refusal.FAILED, self._failure)
        if isinstance(message, messages.Join):
            return self._join(message, body, now), ()
        if isinstance(message, messages.AboutKept):
            return self._kept.serve(message, body)
        answer, parts = self._serve(message, body)
        members = () if self._running is None else self._running.clock
        why = self._deadlocks.after(message, answer, members, self._serve)
        if why is not None:
            self._fail(message.vw, why, now)
        return answer, parts

    def status(self, now: float) -> dict[str, Any]:
        """Return phase, clocks and members as JSON values. The lag is None for a VW at a cut."""
        log = self._running
        slowest = None if log is None else log.slowest
        members = []
        for vw, seen in sorted(self._leases.seen.items()):
            clock = log.clock.get(vw, 0) if log else 0
            waits = log is not None and vw in log.waits
            lag = None if waits or slowest is None else clock - slowest
            member = {"vw": vw, "clock": clock, "lag": lag, "waits_at_cut": waits}
            incarnation, silent = self._roster.incarnation[vw], round(1000 * (now - seen))
            members.append({**member, "silent_ms": silent, "incarnation": incarnation})
        signature = self._roster.signature
        return {
            "epoch": self.epoch,
            "phase": self.phase.value,
            "generation": self.generation,
            "slowest": slowest,
            "commits": 0 if log is None else log.commits,
            "members": members,
            "settings": [] if signature is None else list(signature.settings),
            "newcomers": sorted(self._newcomers),
            "asked": {str(vw): name for vw, name in sorted(self._kept.asked.items())},
            "incarnations": {str(vw): incarnation for vw, incarnation in sorted(self._roster.incarnation.items())},
        }

    # Membership.

    def _replace(self, vw: int) -> None:
        if self._roster.lives(vw):
            self._remove(vw, "started again")
        self._reports.pop(vw, None)

    def _remove(self, vw: int, why: str = "") -> None:
        """End the membership of a VW that has left, or was left out for the reason ``why``."""
        del self._leases.seen[vw]
        self._deadlocks.forget(vw)
        self._joins.pop(vw, None)
        for each in (self._newcomers, self._came, self._kept.asked):
            each.pop(vw, None)
        member = self._attempts.pop(vw, None) is not None
        if not member:
            return
        clocks = self.log.clock if self.log is not None else {}
        assert self._recovery is not None
        clock = clocks[vw] if vw in clocks else self._recovery.members[vw].clock
        self._roster.depart(vw, self._roster.incarnation[vw], clock, why)
        if self._running is not None:
            self._running.drop(vw, why)
            self._admit()
        elif self.phase is Phase.LOADING and self._recovery.holder == vw:
            self.phase = Phase.JOINING

    def _fail(self, vw: int, why: str, now: float) -> None:
        self._failure = f"VW {vw} failed: {why[:MAX_FAILURE]}"
        self._forgotten_at = now + self._leases.seconds
        self.phase = Phase.FAILED

    def _leave(self, message: messages.Leave, now: float) -> Answer:
        if message.failure and not self._failure and self._concerns_all(message):
            self._fail(message.vw, message.failure, now)
        if self._roster.lives(message.vw):
            self._remove(message.vw, message.why[:MAX_FAILURE])
        self._roster.gone[message.vw] = message.incarnation
        return self._roster.done()

    def _concerns_all(self, message: messages.Leave) -> bool:
        """Return True if a failure ends all VWs: the failure of a member, or of a VW without which the generation
        cannot begin. A restarted server knows only from reports which process of a VW was a member."""
        if self._roster.has_gone(message.vw, message.incarnation):
            return False
        if self.phase is not Phase.JOINING:
            return message.vw in self._attempts
        last = newest_pull(self._joins)
        return last is None or (message.vw, message.incarnation) in {(one.vw, one.incarnation) for one in last.members}

    # Beginning of a generation.

    def _join(self, message: messages.Join, body: Bytes, now: float) -> Answer:
        vw = message.vw
        if message.attempt < self._reports.get(vw, 0):
            raise RemoteFault(Refusal.STALE, f"VW {vw} has joined again since")
        self._reports[vw] = message.attempt
        if self._running is not None and not self._running.clock:
            self._newcomers.clear()  # they ask again
            self.phase, self.log = Phase.JOINING, None
        if self.phase is not Phase.JOINING and vw in self._attempts:
            if message.attempt == self._attempts[vw]:
                return self._joined(vw)
            if self.phase is Phase.RUNNING:
                self._joins.clear()
                self._attempts.clear()
                self._lost_at = None
            self.phase = Phase.JOINING
        if self.phase is not Phase.JOINING:
            if message.report.commit_index is not None:
                raise RemoteFault(Refusal.LEFT_OUT, f"the others have gone on without VW {vw}")
            log = None if message.signature.parameters else self._running
            if log is not None and vw and not self._is_open_to(vw, log, now):
                return messages.NotYet("the first epoch of the run")
            self._newcomers[vw] = message
            if log is not None and vw:
                self._take_in(log)  # without a cut, because there are no weights to take
                return self._joined(vw)
            return messages.NotYet("a cut at which VWs may join")
        if message.report.gathered is not None:
            self._gathers.restore(message.report.gathered, body)
        self._joins[vw] = message
        if message.report.commit_index is not None and self._lost_at is None:
            self._lost_at = now
        missing = self._recover(now)
        if missing:
            return messages.NotYet(f"VW {', '.join(map(str, missing))} to join", tuple(missing))
        if vw not in self._attempts:
            return self._join(message, body, now)
        return self._joined(vw)

    def _is_open_to(self, vw: int, log: CommitLog, now: float) -> bool:
        """Return True if ``vw`` may come to a running session without weights. VW 0 admits VWs by leaving bytes for
        them. A silent VW 0 means that a dead launch has left the session behind."""
        came = self._came.setdefault(vw, now)
        return bool(self._kept.content) and 0 in log.clock and self._leases.seen.get(0, came) > came

    def _recover(self, now: float) -> list[int]:
        """Begin the next generation, or return the VWs whose reports are still needed."""
        if not self._joins:
            return []
        waited = self._lost_at is not None and now - self._lost_at > self._leases.seconds
        term = 0 if self._recovery is None else self._recovery.base.term
        found = decide(self._joins, self._leases.seen, self.gone, self.log, term, waited)
        if isinstance(found, list):
            return found
        if all(join.report.gathered is None for join in self._joins.values()):
            self._gathers = Gathers()  # an older result is of another launch, or will be gathered again
        assert self._roster.signature is not None
        for each in found.missing if self._roster.signature.parameters else ():  # other sessions may be left silently
            if not self._roster.has_gone(each.vw, each.incarnation):
                self._roster.depart(each.vw, each.incarnation, each.clock, self._roster.silent)
        self._recovery = found
        self._attempts = {vw: self._joins[vw].attempt for vw in found.members}
        for vw in [vw for vw in self._joins if vw not in found.members]:
            if (join := self._joins.pop(vw)).report.commit_index is None:
                self._newcomers[vw] = join
        self.generation = f"{self.epoch}.{found.base.term}"
        self.phase = Phase.LOADING
        self._learn(found)
        return []

    def _learn(self, recovery: Recovery) -> None:
        """Take the incarnations of VWs that are gone from the reports. Shards know these incarnations, and refuse older
        ones. This includes members that had pushed nothing: their next process must have a larger incarnation."""
        for each in (*recovery.base.included, *recovery.missing):
            if each.vw not in recovery.members and each.incarnation > self._roster.incarnation.get(each.vw, -1):
                if self._roster.lives(each.vw):  # an older process that came before this was known
                    self._remove(each.vw)
                self._roster.incarnation[each.vw] = each.incarnation

    def _joined(self, vw: int) -> Answer:
        recovery = self._recovery
        assert recovery is not None
        if self.phase is Phase.RUNNING:
            assert self.log is not None
            membership = recovery.members.get(vw)
            was_there = membership is not None and membership.incarnation == self._roster.incarnation[vw]
            clock = membership.clock if membership is not None and was_there else self.log.clock[vw]
            return messages.Joined(self.generation, recovery.base, clock, self.log.cut, recovery.lost)
        if vw == recovery.holder:
            return messages.LoadNow(self.generation, recovery.base, self._joins[vw].contents)
        return messages.NotYet(f"VW {recovery.holder} to load the weights")

    def _loaded(self, message: messages.Loaded) -> None:
        if self.phase is not Phase.LOADING:
            return
        recovery, signature = self._recovery, self._roster.signature
        assert recovery is not None
        assert signature is not None
        if message.vw != recovery.holder:
            raise RemoteFault(Refusal.MALFORMED, f"VW {message.vw} was not asked to load weights")
        members = tuple((vw, each.incarnation, each.clock) for vw, each in sorted(recovery.members.items()))
        self._note(GenerationBegan(recovery.base.term, recovery.base.count, members))
        mean = signature.aggregate == "mean"
        self.log = CommitLog(recovery, signature.clock_distance, mean=mean, note=self._note)
        self._joins.clear()
        self._lost_at = None
        self.phase = Phase.RUNNING
        for vw in [vw for vw in recovery.members if vw not in self._attempts]:  # gone while the weights were loaded
            self.log.drop(vw)

    def _admit(self) -> None:
        """Make newcomers members if a cut that admits them has just closed."""
        assert self.log is not None
        if self._newcomers and self.log.cut in self._admits:
            self._take_in(self.log)
        self._admits = {cut for cut in self._admits if cut > self.log.cut}

    def _take_in(self, log: CommitLog) -> None:
        log.admit({vw: join.incarnation for vw, join in self._newcomers.items()})
        self._attempts.update({vw: join.attempt for vw, join in self._newcomers.items()})
        self._newcomers.clear()

    # Requests of members.

    def _serve(self, message: messages.MemberRequest, body: Bytes) -> tuple[Answer, Sequence[Bytes]]:
        if message.generation != self.generation or self.phase is Phase.JOINING:
            raise RemoteFault(Refusal.GENERATION, "a server was lost; the VW has to join again")
        if message.vw not in self._attempts:
            raise RemoteFault(Refusal.LEFT_OUT, f"VW {message.vw} is not a member")
        if isinstance(message, messages.Loaded):
            self._loaded(message)
        log, vw = self._running, message.vw
        if isinstance(message, messages.Heartbeat | messages.Loaded):
            if isinstance(message, messages.Heartbeat) and log is not None:
                log.confirm(vw)
            return self._roster.done(), ()
        if log is None:
            raise RemoteFault(Refusal.GENERATION, "the weights are still being loaded")
        log.confirm(vw)
        if isinstance(message, messages.Pushed):
            log.push(vw, message.clock, message.cut)
        elif isinstance(message, messages.Pulled):
            log.pulled(vw, message.read_lease)
        elif isinstance(message, messages.Pull):
            if (why := log.pull(vw, message.read_lease)) is not None:
                return messages.NotYet(why), ()
            slowest = log.clock[vw] if log.slowest is None else log.slowest
            at = (message.read_lease, log.head, log.start, tuple(log.tail))
            return messages.Granted(*at, slowest, log.cut_at), ()
        elif isinstance(message, messages.Arrive):
            return self._arrive(log, message), ()
        elif isinstance(message, messages.Gather):
            return self._gathers.serve(message, body, log.clock.keys(), log.waits)
        self._admit()
        return self._roster.done(), ()

    def _arrive(self, log: CommitLog, message: messages.Arrive) -> Answer:
        if message.admit and message.cut > log.cut:
            self._admits.add(message.cut)
        clock = log.arrive(message.vw, message.cut)
        self._admit()
        if clock is not None:
            return messages.Closed(clock)
        late = [vw for vw in sorted(log.clock) if vw not in log.waits]
        return messages.NotYet(f"VW {', '.join(map(str, late))} to come to cut {message.cut}")
