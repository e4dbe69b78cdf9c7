"""The order of commits, where it follows from nothing but the log."""

from __future__ import annotations

from lightning_hetpipe.server.protocol.commit_log import CommitLog, Membership, Recovery
from lightning_hetpipe.server.protocol.identifiers import CommitIndex, UpdateId


def log_of(base: CommitIndex, each: Membership, distance: int) -> CommitLog:
    members = {member.vw: each for member in base.members}
    began = Recovery(base, 0, members, cut=0, cut_clock=0, cut_at=-1, lost=(), missing=())
    return CommitLog(began, distance)


def test_what_is_pushed_again_is_added_in_the_order_of_virtual_workers() -> None:
    """Also with a distance, where updates else are added as they arrive (law L5)."""
    owing = Membership(incarnation=1, clock=3, cut=0, owes=True, unpulled=False, behind=False)
    members = tuple(UpdateId(vw, 1, -1) for vw in range(3))
    log = log_of(CommitIndex(2, 6, (), members), owing, distance=1)
    for vw in (2, 0, 1):
        log.confirm(vw)
        log.push(vw, 3, cut=False)
    assert [commit.update.vw for commit in log.tail] == [0, 1, 2]


def test_an_update_that_is_announced_twice_counts_once() -> None:
    """The answer to the first time was lost (law L5)."""
    member = Membership(incarnation=1, clock=0, cut=0, owes=False, unpulled=False, behind=False)
    log = log_of(CommitIndex(1, 0, (), (UpdateId(0, 1, -1),)), member, distance=0)
    log.confirm(0)
    log.push(0, 0, cut=False)
    log.push(0, 0, cut=False)
    assert [commit.update.clock for commit in log.tail] == [0]
    assert log.clock == {0: 1}
