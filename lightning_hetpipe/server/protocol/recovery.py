"""How a generation begins: from what the VWs report, whose weights are loaded, and who stands where (law L5).

    nobody has pulled yet      all VWs must have joined; VW 0's weights are w_0
    somebody has               the newest surviving pull is the base. Its members are expected, and whoever is alive;
                               who is not heard of within a lease is left out. The lowest VW that holds that pull loads
                               it; each pushes again what it lacks.

A VW that was no member at the base holds nothing that counts: it may join at a cut if it is new, and is left out if it
comes from a history that the others have left behind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lightning_hetpipe.server.protocol.commit_log import CommitLog, Membership
from lightning_hetpipe.server.protocol.identifiers import CommitIndex, Refusal, RemoteFault, UpdateId
from lightning_hetpipe.server.protocol.messages import Join, Lost


@dataclass(frozen=True)
class Recovery:
    """A generation's beginning; ``holder`` loads the weights at ``base``."""

    base: CommitIndex
    holder: int
    members: Mapping[int, Membership]
    cut: int
    cut_clock: int
    cut_at: int
    lost: tuple[Lost, ...]
    missing: tuple[UpdateId, ...]
    """Members at the base that are none now, each with the number of its waves that the base includes."""


def check(join: Join) -> None:
    """A report that cannot be is refused before anything is concluded from it.

    Raises:
        RemoteFault: it says why.
    """
    report, me = join.report, UpdateId(join.vw, join.incarnation, -1)
    if not 0 <= join.vw < join.signature.virtual_workers:
        raise RemoteFault(Refusal.MALFORMED, f"there is no VW {join.vw}")
    if len(join.contents) != join.signature.servers or join.signature.clock_distance < 0:
        raise RemoteFault(Refusal.MALFORMED, f"VW {join.vw} contradicts itself")
    if min(report.era, report.clock, report.cut, report.cut_clock) < 0 or join.incarnation < 0:
        raise RemoteFault(Refusal.MALFORMED, f"VW {join.vw} reports what cannot be")
    if report.point is not None and (me not in report.point.members or min(report.point.age) < 0):
        raise RemoteFault(Refusal.MALFORMED, f"VW {join.vw} reports a pull that it cannot have made")
    if report.point is None and report.pending:
        raise RemoteFault(Refusal.MALFORMED, f"VW {join.vw} reports an update to weights that it has not")


def decide(
    joins: Mapping[int, Join],
    alive: Collection[int],
    gone: Mapping[int, int],
    former: CommitLog | None,
    era: int,
    waited: bool,
) -> Recovery | list[int]:
    """The generation that follows from ``joins``, or whose joins it needs first.

    Args:
        joins: by VW, each of its newest incarnation.
        alive: VWs whose lease has not run out.
        gone: incarnations that will not come: they have left, or were left out.
        former: the generation that ended, if this coordinator has seen it.
        era: the last one that this coordinator knows of.
        waited: a lease has passed since the first VW came back from a generation that was lost.
    """
    points = [join.report.point for join in joins.values() if join.report.point is not None]
    last = max(points, key=lambda point: point.age, default=None)
    if last is None:
        if absent := [vw for vw in range(_number(joins)) if vw not in joins]:
            return absent
        belongs = dict.fromkeys(joins, True)
        holder, count = 0, 0
        included: tuple[UpdateId, ...] = ()
    else:
        expected = {mark.vw for mark in last.members if gone.get(mark.vw, -1) < mark.incarnation}
        missing = ((set() if waited else expected) | set(alive)) - joins.keys()
        if missing:
            return sorted(missing)
        were = {(mark.vw, mark.incarnation) for mark in last.members}
        belongs = {vw: (vw, join.incarnation) in were for vw, join in joins.items()}
        at_base = [vw for vw, join in joins.items() if join.report.point is not None and join.report.point == last]
        holder, count, included = min(at_base), last.count, last.included

    members = {vw: join for vw, join in joins.items() if belongs[vw]}
    era = 1 + max(era, *(join.report.era for join in members.values()), last.era if last else 0)
    base = CommitIndex(era, count, included, tuple(UpdateId(vw, members[vw].incarnation, -1) for vw in sorted(members)))
    cut, cut_clock = max((join.report.cut, join.report.cut_clock) for join in members.values())
    return Recovery(
        base,
        holder,
        {vw: _standing(join, base, cut, cut_clock, holder) for vw, join in members.items()},
        cut,
        cut_clock,
        max(join.report.cut_at for join in members.values()),
        _lost(members, base, former, last),
        tuple(
            UpdateId(mark.vw, mark.incarnation, _waves(base, mark.vw, mark.incarnation))
            for mark in (last.members if last else ())
            if mark.vw not in members
        ),
    )


def _number(joins: Mapping[int, Join]) -> int:
    return next((join.signature.virtual_workers for join in joins.values()), 1)


def _standing(join: Join, base: CommitIndex, cut: int, cut_clock: int, holder: int) -> Membership:
    report = join.report
    has = report.pending and base.includes(UpdateId(join.vw, join.incarnation, report.clock))
    owes = report.pending and not has
    # The base is then at that cut, or beyond: the VW waits there, or at a later one.
    at_cut = report.cut < cut and not owes
    return Membership(
        incarnation=join.incarnation,
        clock=max(cut_clock, report.clock) if at_cut else report.clock + has,
        cut=report.cut,
        owes=owes,
        unpulled=has,
        behind=report.cut < cut or (report.point is None and join.vw != holder),
    )


def _lost(
    members: Mapping[int, Join], base: CommitIndex, former: CommitLog | None, last: CommitIndex | None
) -> tuple[Lost, ...]:
    """Updates that were pushed, as far as anyone knows, and are neither in the base nor pushed again."""
    if former is not None:
        held = {vw for vw, join in members.items() if join.report.pending}
        return tuple(
            Lost(mark.vw, mark.incarnation, _waves(base, mark.vw, mark.incarnation), mark.clock)
            for mark in former.newest
            if mark.vw not in held and not base.includes(mark)
        )
    gone = [mark for mark in (last.members if last else ()) if mark.vw not in members]
    return tuple(Lost(mark.vw, mark.incarnation, _waves(base, mark.vw, mark.incarnation), -1) for mark in gone)


def _waves(base: CommitIndex, vw: int, incarnation: int) -> int:
    """The number of waves of this incarnation that ``base`` includes."""
    return next((mark.clock + 1 for mark in base.included if (mark.vw, mark.incarnation) == (vw, incarnation)), 0)
