"""The order of commits in one generation: clocks, waves, turns and cuts of the live members (laws L3, L4 and L6).

    a VW       pushed        its update is the last one of the VW's, and of clock c_local; c_local grows
      |
      |        committed     D = 0: once the whole wave is there, in VW order; D > 0: in order of arrival. Not while a
      |                      turn runs, nor while somebody has still to take the final weights of a cut
      v
               pulled        in a turn, at the head of the order, which includes the VW's own update; c_global is at
                             least c_local - D. No turn is given while a commit waits for others to end

A VW that waits at a cut has no turn until all have come, nothing is left to commit, and the cut closes. Then all clocks
become the largest, and everyone takes the head, which does not move before they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_hetpipe.rules.waves import cut_after, may_commit, may_pull, slowest
from lightning_hetpipe.server.protocol.decisions import (
    CutClosed,
    CutHeld,
    MemberLeft,
    Note,
    ReadGranted,
    UpdateCommitted,
    UpdatePushed,
    ignore,
)
from lightning_hetpipe.server.protocol.identifiers import (
    Commit,
    CommitIndex,
    Refusal,
    RemoteFault,
    UpdateId,
    with_commits,
)
from lightning_hetpipe.server.protocol.messages import MemberStatus, Status


@dataclass(frozen=True)
class Membership:
    """Where a member stands when a generation begins."""

    incarnation: int
    clock: int
    cut: int
    """The last one that it has passed."""
    owes: bool
    """It has an update that the base lacks, and pushes it again before anyone pulls."""
    unpulled: bool
    """Its last update is in the base, but in none of its own pulls."""
    behind: bool
    """It has still to take the weights of the last cut."""


class CommitLog:
    """One generation's commits.

    Args:
        base: what the generation begins with.
        members: by VW.
        distance: D.
        mean: whether an update is divided by the number of members that its wave began with. A member that dies, or
            waits at a cut, adds zero to the sum: what the others add does not depend on when it did.
        cut, cut_clock: the last one that somebody has passed.
        cut_at: the clock at which VW 0 wants to cut, -1 for none.
        note: told every decision.
    """

    def __init__(
        self,
        base: CommitIndex,
        members: Mapping[int, Membership],
        distance: int,
        *,
        mean: bool = False,
        cut: int = 0,
        cut_clock: int = 0,
        cut_at: int = -1,
        note: Note = ignore,
    ) -> None:
        self.base = base
        self.cut = cut
        self.cut_at = cut_at
        self.clock = {vw: each.clock for vw, each in members.items()}
        self.waits: dict[int, int] = {}
        """The cuts at which VWs wait."""
        self.start = 0
        """Every shard has added at least so many of this generation's commits."""
        self.tail: list[Commit] = []
        """The commits after those."""
        self._note = note
        self._held: dict[int, tuple[int, str]] = {}
        """The last turn for which it was noted that a VW has to wait, and why."""
        self._distance = distance
        self._mean = mean
        self._cut_clock = cut_clock
        self._incarnation = {vw: each.incarnation for vw, each in members.items()}
        self._passed = {vw: each.cut for vw, each in members.items()}
        self._owing = {vw for vw, each in members.items() if each.owes}
        self._unconfirmed = set(members)
        self._unpulled = {vw for vw, each in members.items() if each.unpulled}
        self._behind = {vw for vw, each in members.items() if each.behind and not each.owes}
        self._repushed: list[UpdateId] = []
        self._queue: list[UpdateId] = []
        """Pushed and not committed, in order of arrival."""
        self._included = base.included
        self._turns: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        """Of each open wave, how many members it began with."""
        self._advance()

    @property
    def members(self) -> tuple[UpdateId, ...]:
        return tuple(UpdateId(vw, self._incarnation[vw], -1) for vw in sorted(self.clock))

    @property
    def slowest(self) -> int | None:
        """c_global, ``None`` where everyone waits at a cut."""
        return slowest(None if vw in self.waits else clock for vw, clock in self.clock.items())

    @property
    def head(self) -> CommitIndex:
        return CommitIndex(self.base.era, self.base.count + self.commits, self._included, self.members)

    @property
    def commits(self) -> int:
        return self.start + len(self.tail)

    @property
    def newest(self) -> tuple[UpdateId, ...]:
        """The last update that each VW has pushed, dead ones too."""
        return with_commits(self._included, [Commit(mark, 1) for mark in sorted([*self._repushed, *self._queue])])

    def confirm(self, vw: int) -> None:
        """The VW knows of the generation, so that what it reported for it was its last report, and true.

        Until all do, nobody may pull: a report that came late, of a pull that was not its VW's last, would lead to
        weights that lack what others have seen.
        """
        self._unconfirmed.discard(vw)

    def push(self, vw: int, clock: int, cut: bool) -> None:
        """All shards hold the VW's update of ``clock``."""
        if clock < self.clock[vw]:
            return  # said before
        if clock > self.clock[vw] or vw in self.waits or vw in self._unpulled or vw in self._behind:
            raise RemoteFault(Refusal.MALFORMED, f"VW {vw} cannot push wave {clock} now")
        mark = UpdateId(vw, self._incarnation[vw], clock)
        (self._repushed if vw in self._owing else self._queue).append(mark)
        self._owing.discard(vw)
        self._unpulled.add(vw)
        self.clock[vw] = clock + 1
        self._note(UpdatePushed(vw, mark.incarnation, clock))
        if cut:
            self.cut_at = max(self.cut_at, cut_after(clock, self._distance))
        self._advance()

    def pull(self, vw: int, turn: int) -> str | None:
        """Gives the VW a turn, at ``head``; or says what it has to wait for."""
        if turn <= self._ended.get(vw, -1) or turn < self._turns.get(vw, turn):
            raise RemoteFault(Refusal.STALE, f"turn {turn} of VW {vw} is over")
        if vw in self.waits:
            raise RemoteFault(Refusal.MALFORMED, f"VW {vw} waits at cut {self.waits[vw]} and cannot pull")
        if vw not in self._turns:
            if (why := self._not_yet(vw)) is not None:
                if self._held.get(vw) != (turn, why):
                    self._held[vw] = turn, why
                    self._note(CutHeld(vw, turn, self.clock[vw], self.slowest, why))
                return why
            slowest = None if vw in self._behind else self.slowest
            self._note(ReadGranted(vw, turn, self.clock[vw], slowest, self.head.count))
        self._turns[vw] = turn
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
        if self._ready() or any(mark.vw == vw for mark in self._queue):
            return f"{_named({*self._turns, *self._behind})} to take weights"
        return None

    def pulled(self, vw: int, turn: int) -> None:
        """The VW has the weights of its turn, from all shards."""
        if self._turns.get(vw) != turn:
            if self._ended.get(vw) == turn:
                return  # said before
            raise RemoteFault(Refusal.STALE, f"turn {turn} of VW {vw} is over")
        self._ended[vw] = self._turns.pop(vw)
        self._behind.discard(vw)
        self._unpulled.discard(vw)
        # The head has not moved since the turn was given, and every shard has been read at it.
        self.start += len(self.tail)
        self.tail.clear()
        self._advance()

    def arrive(self, vw: int, cut: int) -> int | None:
        """The clock after the cut, if it has closed; else the VW waits there."""
        if cut > self._passed[vw]:
            if cut > self.cut:
                if vw in self._owing:
                    raise RemoteFault(Refusal.MALFORMED, f"VW {vw} has to push again before it waits at cut {cut}")
                self.waits[vw] = cut
                self._behind.discard(vw)  # it was not at the cut that closed last
                self._advance()
            elif cut == self.cut:  # others had passed it when servers were lost
                self._passed[vw], self.clock[vw] = cut, self._cut_clock
            else:
                raise RemoteFault(Refusal.MALFORMED, f"VW {vw} comes to cut {cut} after cut {self.cut}")
        return None if self._passed[vw] < cut else self._cut_clock

    def drop(self, vw: int, why: str = "") -> None:
        """The VW is no member any more, as it has left, or ``why`` else. What it has pushed counts."""
        self._note(MemberLeft(vw, self.clock[vw], why))
        for each in (self.clock, self.waits, self._turns, self._ended, self._passed, self._incarnation):
            each.pop(vw, None)
        for group in (self._unconfirmed, self._owing, self._unpulled, self._behind):
            group.discard(vw)
        self._advance()

    def admit(self, newcomers: Mapping[int, int]) -> None:
        """New members, with their incarnations, join those who have just passed a cut."""
        for vw, incarnation in newcomers.items():
            self._incarnation[vw] = incarnation
            self.clock[vw], self._passed[vw] = self._cut_clock, self.cut
            self._behind.add(vw)

    def _ready(self) -> list[UpdateId]:
        """What is to be committed next, were it not for turns."""
        if not self._queue or self._owing:
            return []
        if self._distance > 0:
            return self._queue[:1]
        wave = min(mark.clock for mark in self._queue)
        return sorted(mark for mark in self._queue if mark.clock == wave) if may_commit(wave, self.slowest) else []

    def _advance(self) -> None:
        """Commits what can be, and closes the cut once all wait."""
        if not self._owing and self._repushed:
            self._queue[:0] = sorted(self._repushed)
            self._repushed.clear()
        self._count()
        while not self._turns and not self._behind:
            if ready := self._ready():
                for mark in ready:
                    self._queue.remove(mark)
                    self.tail.append(Commit(mark, self._sizes[mark.clock] if self._mean else 1))
                    self._included = with_commits(self._included, self.tail[-1:])
                    place = self.base.count + self.commits
                    self._note(UpdateCommitted(mark.vw, mark.incarnation, mark.clock, self.tail[-1].divisor, place))
                self._count()
            elif self.clock and self.clock.keys() == self.waits.keys() and not self._queue and not self._owing:
                self._close()
            else:
                break

    def _count(self) -> None:
        """A wave's size is fixed when it begins: when the one before it closes, or (D > 0) with its first update."""
        least = self.slowest
        begun = {mark.clock for mark in self._queue} | ({least} if least is not None else set())
        open_ = {wave for wave in self._sizes if begun and wave >= min(begun)}
        self._sizes = {wave: self._sizes.get(wave, len(self.clock)) for wave in begun | open_}

    def _close(self) -> None:
        """All have come to a cut: the earliest closes, and those who wait at later ones go on waiting."""
        self.cut = min(self.waits.values())
        # Dead VWs' clocks count: no wave has updates from both sides of a cut.
        self._cut_clock = max(*self.clock.values(), *(mark.clock + 1 for mark in self._included), 0)
        here = [vw for vw, cut in self.waits.items() if cut == self.cut]
        self._note(CutClosed(self.cut, self._cut_clock, tuple(sorted(here))))
        for vw in here:
            del self.waits[vw]
            self.clock[vw], self._passed[vw] = self._cut_clock, self.cut
            self._behind.add(vw)
            self._unpulled.add(vw)
        self._count()


def status_of(
    epoch: str,
    phase: str,
    generation: str,
    order: CommitLog | None,
    incarnations: Mapping[int, int],
    silent: Mapping[int, float],
) -> Status:
    """What ``AskStatus`` is answered; ``silent`` says for how many seconds each VW that is alive has been."""
    members = tuple(
        MemberStatus(
            vw,
            incarnations[vw],
            order.clock.get(vw, 0) if order else 0,
            order.waits.get(vw, -1) if order else -1,
            round(1000 * seconds),
        )
        for vw, seconds in sorted(silent.items())
    )
    slowest = -1 if order is None or order.slowest is None else order.slowest
    commits = 0 if order is None else order.commits
    return Status(epoch, phase, generation, slowest, commits, members)


def _named(vws: Iterable[int]) -> str:
    return "VW " + ", ".join(map(str, sorted(vws)))
