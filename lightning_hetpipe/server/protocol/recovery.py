"""Beginning of a generation, from the VWs' reports: whose weights are loaded, and what each member has to do (law L5).

    no VW has pulled yet       all VWs must have joined, or VW 0's ``least``; VW 0's weights are w_0
    a VW has pulled            the newest surviving pull is the base. Its members and all live VWs are expected. A
                               VW that is silent for a lease is left out. The lowest VW that holds the base loads
                               it; each VW pushes again the updates that the base lacks.

Reports of VWs that were no members at the base do not count. Such a VW may be new, and may join at a cut. Or it is of a
generation that the other VWs have left behind, and is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lightning_hetpipe.server.protocol.commit_log import CommitLog, Membership, Recovery
from lightning_hetpipe.server.protocol.identifiers import CommitIndex, Refusal, RemoteFault, UpdateId
from lightning_hetpipe.server.protocol.messages import Join, Lost


def check(join: Join) -> None:
    """Refuse a report that contradicts itself, by a RemoteFault with the contradiction."""
    report, me = join.report, UpdateId(join.vw, join.incarnation, -1)
    if not 0 <= join.vw < join.signature.virtual_workers:
        raise RemoteFault(Refusal.MALFORMED, f"there is no VW {join.vw}")
    if len(join.contents) != join.signature.servers or join.signature.clock_distance < 0:
        raise RemoteFault(Refusal.MALFORMED, f"VW {join.vw} contradicts itself")
    if min(report.term, report.clock, report.cut, report.cut_clock) < 0 or join.incarnation < 0:
        raise RemoteFault(Refusal.MALFORMED, f"VW {join.vw} reports what cannot be")
    if report.commit_index is not None and (me not in report.commit_index.members or min(report.commit_index.age) < 0):
        raise RemoteFault(Refusal.MALFORMED, f"VW {join.vw} reports a pull that it cannot have made")
    if report.commit_index is None and report.pending:
        raise RemoteFault(Refusal.MALFORMED, f"VW {join.vw} reports an update to weights that it has not")


def decide(
    joins: Mapping[int, Join],
    alive: Collection[int],
    gone: Mapping[int, int],
    former: CommitLog | None,
    term: int,
    waited: bool,
) -> Recovery | list[int]:
    """Return the generation that follows from ``joins``, or the VWs that have to join first.

    Args:
        joins: Requests of the newest incarnations, by VW.
        alive: VWs whose lease has not run out.
        gone: Last incarnation of each VW that has left or was left out.
        former: Log of the generation that ended, if this coordinator has it.
        term: Last term that this coordinator knows.
        waited: Whether a lease has passed since the first VW came back from a lost generation.
    """
    last = newest_pull(joins)
    if last is None:
        number = next((join.signature.virtual_workers for join in joins.values()), 1)
        absent = [vw for vw in range(number) if vw not in joins]
        if absent and not (0 in joins and 0 < joins[0].signature.least <= len(joins)):
            return absent
        belongs = dict.fromkeys(joins, True)
        holder, count = 0, 0
        included: tuple[UpdateId, ...] = ()
    else:
        expected = {member.vw for member in last.members if gone.get(member.vw, -1) < member.incarnation}
        missing = ((set() if waited else expected) | set(alive)) - joins.keys()
        if missing:
            return sorted(missing)
        were = {(member.vw, member.incarnation) for member in last.members}
        # Without weights, a VW that has come back meanwhile has missed nothing, and stays.
        weightless = {vw for vw, join in joins.items() if not join.signature.parameters and join.report.commit_index}
        belongs = {vw: (vw, join.incarnation) in were or vw in weightless for vw, join in joins.items()}
        at_base = [vw for vw, join in joins.items() if join.report.commit_index == last]
        holder, count, included = min(at_base), last.count, last.included

    members = {vw: join for vw, join in joins.items() if belongs[vw]}
    term = 1 + max(term, *(join.report.term for join in members.values()), last.term if last else 0)
    base = CommitIndex(
        term, count, included, tuple(UpdateId(vw, members[vw].incarnation, -1) for vw in sorted(members))
    )
    cut, cut_clock = max((join.report.cut, join.report.cut_clock) for join in members.values())
    gone_since = [member for member in (last.members if last else ()) if member.vw not in members]
    return Recovery(
        base=base,
        holder=holder,
        members={vw: _membership(join, base, cut, cut_clock, holder) for vw, join in members.items()},
        cut=cut,
        cut_clock=cut_clock,
        cut_at=max(join.report.cut_at for join in members.values()),
        lost=_lost(members, base, former, gone_since),
        missing=tuple(UpdateId(each.vw, each.incarnation, _waves(base, each)) for each in gone_since),
    )


def newest_pull(joins: Mapping[int, Join]) -> CommitIndex | None:
    """Return the newest pull in the reports of ``joins``, or None if no VW has pulled yet."""
    pulls = [join.report.commit_index for join in joins.values() if join.report.commit_index is not None]
    return max(pulls, key=lambda commit_index: commit_index.age, default=None)


def _membership(join: Join, base: CommitIndex, cut: int, cut_clock: int, holder: int) -> Membership:
    report = join.report
    has = report.pending and base.includes(UpdateId(join.vw, join.incarnation, report.clock))
    owes = report.pending and not has
    # Then the base is at that cut or beyond, and the VW waits at that cut or at a later cut.
    at_cut = report.cut < cut and not owes
    return Membership(
        incarnation=join.incarnation,
        clock=max(cut_clock, report.clock) if at_cut else report.clock + has,
        cut=report.cut,
        owes=owes,
        unpulled=has,
        behind=report.cut < cut or (report.commit_index is None and join.vw != holder),
    )


def _lost(
    members: Mapping[int, Join], base: CommitIndex, former: CommitLog | None, gone: Sequence[UpdateId]
) -> tuple[Lost, ...]:
    """Return the updates that are known to have been pushed, but are neither in the base nor pushed again."""
    if former is not None:
        held = {vw for vw, join in members.items() if join.report.pending}
        return tuple(
            Lost(update.vw, update.incarnation, _waves(base, update), update.clock)
            for update in former.newest
            if update.vw not in held and not base.includes(update)
        )
    return tuple(Lost(member.vw, member.incarnation, _waves(base, member), -1) for member in gone)


def _waves(base: CommitIndex, member: UpdateId) -> int:
    """Return the number of waves of the member's incarnation in ``base``."""
    mine = (member.vw, member.incarnation)
    return next((last.clock + 1 for last in base.included if (last.vw, last.incarnation) == mine), 0)
