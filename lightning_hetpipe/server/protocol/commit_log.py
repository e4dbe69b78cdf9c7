"""Log of commits in one generation: clocks, waves, read leases and cuts of the members (laws L3, L4 and L6).

    an update is   pushed      it is the last update of its VW, and of clock c_local; c_local grows
      |
      |            committed   D = 0: once the whole wave is there, in VW order; D > 0: in order of arrival. Not during
      |                        a read lease, nor while a VW has still to take the final weights of a cut
      v
                   pulled      with a read lease at the end of the log, which includes the VW's own update; c_global is
                               at least c_local - D. No lease is given while a commit waits for leases to end

A VW that waits at a cut gets no read lease until all VWs have come, all updates are committed, and the cut closes. Then
all clocks become the largest clock, and all VWs pull the end of the log, which does not move before.

Decisions are noted as values, from which the laws L3 to L6 can be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lightning_hetpipe.rules.waves import cut_after, may_commit, may_pull, slowest
from lightning_hetpipe.server.protocol.identifiers import Commit, CommitIndex, Refusal, RemoteFault, UpdateId
from lightning_hetpipe.server.protocol.messages import Lost


@dataclass(frozen=True)
class GenerationBegan:
    """Beginning of a generation. ``members`` are (VW, incarnation, clock). Its weights include ``count`` updates."""

    term: int
    count: int
    members: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class UpdatePushed:
    """Arrival of an update at all shards. It is not committed yet."""

    vw: int
    incarnation: int
    clock: int


@dataclass(frozen=True)
class UpdateCommitted:
    """Commit of an update to the log, as the ``count``-th since the run's start."""

    vw: int
    incarnation: int
    clock: int
    divisor: int
    count: int


@dataclass(frozen=True)
class ReadGranted:
    """Permission for a VW that has pushed ``clock`` waves to read weights with the first ``count`` updates. ``slowest``
    is c_global, or None if all VWs wait at a cut, or this VW has just passed a cut."""

    vw: int
    read_lease: int
    clock: int
    slowest: int | None
    count: int


@dataclass(frozen=True)
class ReadHeld:
    """Wait of a VW that may not read weights yet, for the reason ``why``. It is noted once for each reason."""

    vw: int
    read_lease: int
    clock: int
    slowest: int | None
    why: str


@dataclass(frozen=True)
class CutClosed:
    """Arrival of all VWs at a cut. ``clock`` is now the clock of all."""

    cut: int
    clock: int
    vws: tuple[int, ...]


@dataclass(frozen=True)
class MemberLeft:
    """End of a membership after ``clock`` waves. ``why`` is the reason for leaving the VW out, or empty if it left."""

    vw: int
    clock: int
    why: str


Decision = GenerationBegan | UpdatePushed | UpdateCommitted | ReadGranted | ReadHeld | CutClosed | MemberLeft
Note = Callable[[Decision], None]


def ignore(decision: Decision) -> None:
    """Drop a decision."""


@dataclass(frozen=True)
class Membership:
    """State of a member when a generation begins.

    Attributes:
        cut: The last cut that it has passed.
        owes: True if the base lacks its last update. It pushes this update again before any VW pulls.
        unpulled: True if its last update is in the base, but in none of its own pulls.
        behind: True if it has still to take the weights of the last cut.
    """

    incarnation: int
    clock: int
    cut: int
    owes: bool
    unpulled: bool
    behind: bool


@dataclass(frozen=True)
class Recovery:
    """Beginning of a generation.

    Attributes:
        holder: The VW that loads the weights at ``base``.
        members: State of each member, by VW.
        cut, cut_clock: The last cut that any VW has passed, and the clock there.
        cut_at: The clock at which VW 0 wants to cut, or -1.
        missing: Former members at the base that are not members now, each with the number of its waves in the base.
    """

    base: CommitIndex
    holder: int
    members: Mapping[int, Membership]
    cut: int
    cut_clock: int
    cut_at: int
    lost: tuple[Lost, ...]
    missing: tuple[UpdateId, ...]


class CommitLog:
    """Commits of a generation that begins as ``recovery`` says.

    Args:
        distance: D.
        mean: Whether to divide an update by the number of members at its wave's beginning. A member that dies, or waits
            at a cut, adds zero to the sum. So the time of its end does not change the other members' shares.
        note: Receives every decision.
    """

    def __init__(self, recovery: Recovery, distance: int, *, mean: bool = False, note: Note = ignore) -> None:
        self.base, members = recovery.base, recovery.members
        self.cut = recovery.cut
        self.cut_at = recovery.cut_at
        self.clock = {vw: each.clock for vw, each in members.items()}
        self.waits: dict[int, int] = {}
        """The cut at which a VW waits, by VW."""
        self.start = 0
        """Number of this generation's commits that every shard has added."""
        self.tail: list[Commit] = []
        """Commits after ``start``."""
        self._note = note
        self._held: dict[int, tuple[int, str]] = {}
        """The last read lease for which a wait was noted, and its reason, by VW."""
        self._distance = distance
        self._mean = mean
        self._cut_clock = recovery.cut_clock
        self._incarnation = {vw: each.incarnation for vw, each in members.items()}
        self._passed = {vw: each.cut for vw, each in members.items()}
        self._owing = {vw for vw, each in members.items() if each.owes}
        self._unconfirmed = set(members)
        self._unpulled = {vw for vw, each in members.items() if each.unpulled}
        self._behind = {vw for vw, each in members.items() if each.behind and not each.owes}
        self._repushed: list[UpdateId] = []
        self._queue: list[UpdateId] = []
        """Pushed updates that are not committed yet, in order of arrival."""
        self._included = self.base.included
        self._read_leases: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        """Number of members at the beginning of each open wave."""
        self._advance()

    @property
    def members(self) -> tuple[UpdateId, ...]:
        return tuple(UpdateId(vw, self._incarnation[vw], -1) for vw in sorted(self.clock))

    @property
    def slowest(self) -> int | None:
        """c_global, or None if all VWs wait at a cut."""
        return slowest(None if vw in self.waits else clock for vw, clock in self.clock.items())

    @property
    def head(self) -> CommitIndex:
        return CommitIndex(self.base.term, self.base.count + self.commits, self._included, self.members)

    @property
    def commits(self) -> int:
        return self.start + len(self.tail)

    @property
    def newest(self) -> tuple[UpdateId, ...]:
        """The last pushed update of each VW, including VWs that are gone."""
        return self._included_with(sorted([*self._repushed, *self._queue]))

    def confirm(self, vw: int) -> None:
        """Record that the VW knows of the generation, so that its report was its last. Before all VWs confirm, no VW
        may pull: a late report of an older pull could restore weights without updates that other VWs have seen."""
        self._unconfirmed.discard(vw)

    def push(self, vw: int, clock: int, cut: bool) -> None:
        """Add the VW's update of ``clock``, which all shards hold, to the log."""
        if clock < self.clock[vw]:
            return  # a repetition
        if clock > self.clock[vw] or vw in self.waits or vw in self._unpulled or vw in self._behind:
            raise RemoteFault(Refusal.MALFORMED, f"VW {vw} cannot push wave {clock} now")
        update = UpdateId(vw, self._incarnation[vw], clock)
        (self._repushed if vw in self._owing else self._queue).append(update)
        self._owing.discard(vw)
        self._unpulled.add(vw)
        self.clock[vw] = clock + 1
        self._note(UpdatePushed(vw, update.incarnation, clock))
        if cut and self.cut_at <= clock:  # else a cut is near already, and a second wish must not delay it
            self.cut_at = cut_after(clock, self._distance)
        self._advance()

    def pull(self, vw: int, read_lease: int) -> str | None:
        """Give the VW a read lease at ``head``, or return the reason why it has to wait."""
        if read_lease <= self._ended.get(vw, -1) or read_lease < self._read_leases.get(vw, read_lease):
            raise RemoteFault(Refusal.STALE, f"read lease {read_lease} of VW {vw} is over")
        if vw in self.waits:
            raise RemoteFault(Refusal.MALFORMED, f"VW {vw} waits at cut {self.waits[vw]} and cannot pull")
        if vw not in self._read_leases:
            if (why := self._not_yet(vw)) is not None:
                if self._held.get(vw) != (read_lease, why):
                    self._held[vw] = read_lease, why
                    self._note(ReadHeld(vw, read_lease, self.clock[vw], self.slowest, why))
                return why
            slowest = None if vw in self._behind else self.slowest
            self._note(ReadGranted(vw, read_lease, self.clock[vw], slowest, self.head.count))
        self._read_leases[vw] = read_lease
        return None

    def _not_yet(self, vw: int) -> str | None:
        if self._unconfirmed:
            return f"{_named(self._unconfirmed)} to take note that servers were lost"
        if vw in self._behind:
            return None
        if self._owing:
            return f"{_named(self._owing)} to push again what the lost servers held"
        if not may_pull(self.clock[vw], self.slowest, self._distance):
            least = self.clock[vw] - self._distance
            late = [other for other, clock in self.clock.items() if clock < least and other not in self.waits]
            return f"{_named(late)} to finish wave {least - 1}"
        if self._ready() or any(update.vw == vw for update in self._queue):
            return f"{_named({*self._read_leases, *self._behind})} to take weights"
        return None

    def pulled(self, vw: int, read_lease: int) -> None:
        """End the read lease, because the VW has the weights of all shards."""
        if self._read_leases.get(vw) != read_lease:
            if self._ended.get(vw) == read_lease:
                return  # a repetition
            raise RemoteFault(Refusal.STALE, f"read lease {read_lease} of VW {vw} is over")
        self._ended[vw] = self._read_leases.pop(vw)
        self._behind.discard(vw)
        self._unpulled.discard(vw)
        # The log has not grown since the read lease was given, and every shard has been read at it.
        self.start += len(self.tail)
        self.tail.clear()
        self._advance()

    def arrive(self, vw: int, cut: int) -> int | None:
        """Return the clock after the cut if the cut has closed. Otherwise record that the VW waits there."""
        if cut > self._passed[vw]:
            if cut > self.cut:
                if vw in self._owing:
                    raise RemoteFault(Refusal.MALFORMED, f"VW {vw} has to push again before it waits at cut {cut}")
                self.waits[vw] = cut
                self._behind.discard(vw)  # it did not wait at the last closed cut
                self._advance()
            elif cut == self.cut:  # other VWs had passed it when servers were lost
                self._passed[vw], self.clock[vw] = cut, self._cut_clock
            else:
                raise RemoteFault(Refusal.MALFORMED, f"VW {vw} comes to cut {cut} after cut {self.cut}")
        return None if self._passed[vw] < cut else self._cut_clock

    def drop(self, vw: int, why: str = "") -> None:
        """End the membership of a VW that has left, or was left out for the reason ``why``. Its pushed updates
        count."""
        self._note(MemberLeft(vw, self.clock[vw], why))
        for each in (self.clock, self.waits, self._read_leases, self._ended, self._passed, self._incarnation):
            each.pop(vw, None)
        for group in (self._unconfirmed, self._owing, self._unpulled, self._behind):
            group.discard(vw)
        self._advance()

    def admit(self, newcomers: Mapping[int, int]) -> None:
        """Add members, given with their incarnations, at a cut that has just closed."""
        for vw, incarnation in newcomers.items():
            self._incarnation[vw] = incarnation
            self.clock[vw], self._passed[vw] = self._cut_clock, self.cut
            self._behind.add(vw)
        self._sizes.clear()  # no wave is open at a cut, and the next waves include these members
        self._count()

    def _ready(self) -> list[UpdateId]:
        """Return the updates to commit next, as soon as no VW holds a read lease."""
        if not self._queue or self._owing:
            return []
        if self._distance > 0:
            return self._queue[:1]
        wave = min(update.clock for update in self._queue)
        complete = may_commit(wave, self.slowest)
        return sorted(update for update in self._queue if update.clock == wave) if complete else []

    def _advance(self) -> None:
        """Commit all updates that can be committed, and close the cut once all VWs wait."""
        if not self._owing and self._repushed:
            self._queue[:0] = sorted(self._repushed)
            self._repushed.clear()
        self._count()
        while not self._read_leases and not self._behind:
            if ready := self._ready():
                for update in ready:
                    self._queue.remove(update)
                    self.tail.append(Commit(update, self._sizes[update.clock] if self._mean else 1))
                    self._included = self._included_with([update])
                    made = (self.tail[-1].divisor, self.base.count + self.commits)
                    self._note(UpdateCommitted(update.vw, update.incarnation, update.clock, *made))
                self._count()
            elif self.clock and self.clock.keys() == self.waits.keys() and not self._queue and not self._owing:
                self._close()
            else:
                break

    def _included_with(self, updates: Iterable[UpdateId]) -> tuple[UpdateId, ...]:
        """Return the last included update of each VW after a commit of ``updates``."""
        last = {update.vw: update for update in (*self._included, *updates)}
        return tuple(last[vw] for vw in sorted(last))

    def _count(self) -> None:
        """Fix the size of begun waves. A wave begins when the wave before closes, or with its first update (D > 0)."""
        least = self.slowest
        begun = {update.clock for update in self._queue} | ({least} if least is not None else set())
        open_ = {wave for wave in self._sizes if begun and wave >= min(begun)}
        self._sizes = {wave: self._sizes.get(wave, len(self.clock)) for wave in begun | open_}

    def _close(self) -> None:
        """Close the earliest cut, because all VWs wait at some cut. VWs at later cuts go on waiting."""
        self.cut = min(self.waits.values())
        # The clocks of VWs that are gone count: no wave has updates from both sides of a cut.
        self._cut_clock = max(*self.clock.values(), *(update.clock + 1 for update in self._included), 0)
        here = [vw for vw, cut in self.waits.items() if cut == self.cut]
        self._note(CutClosed(self.cut, self._cut_clock, tuple(sorted(here))))
        for vw in here:
            del self.waits[vw]
            self.clock[vw], self._passed[vw] = self._cut_clock, self.cut
            self._behind.add(vw)
            self._unpulled.add(vw)
        self._count()


def _named(vws: Iterable[int]) -> str:
    return "VW " + ", ".join(map(str, sorted(vws)))
