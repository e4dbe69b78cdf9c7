"""The protocol's rules, one story each: who waits for whom, who is left out, and what is made known."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lightning_hetpipe.server.process.held_weights import decisive
from lightning_hetpipe.server.protocol.coordinator import Coordinator
from lightning_hetpipe.server.protocol.identifiers import (
    COORDINATOR,
    CommitIndex,
    LocalFault,
    PeerFailed,
    Refusal,
    RemoteFault,
    UpdateId,
)
from lightning_hetpipe.server.protocol.member import Member, MemberState
from lightning_hetpipe.server.protocol.messages import (
    Answer,
    Arrive,
    Departed,
    Done,
    Gather,
    Gathered,
    GatherPart,
    Granted,
    Heartbeat,
    Join,
    Joined,
    KeepBytes,
    Leave,
    Loaded,
    Lost,
    NotYet,
    Pull,
    Pulled,
    Pushed,
    Report,
    Request,
    TrainingSignature,
)
from lightning_hetpipe.server.protocol.recovery import newest_pull
from lightning_hetpipe.server.protocol.roster import difference
from tests.server.world import LEASE, World, parameter, signature


@pytest.mark.parametrize(
    ("first", "second", "decides"),
    [
        (Done(), None, "second"),
        (Done(), RemoteFault(Refusal.FENCED, "newer"), "second"),
        (Done(), RemoteFault(Refusal.STALE, "overtaken"), "second"),
        (None, RemoteFault(Refusal.STALE, "overtaken"), "first"),
        (None, RemoteFault(Refusal.FENCED, "newer"), "second"),
    ],
)
def test_one_answer_of_a_server_counts_for_all_parts_of_an_update(
    first: Answer | RemoteFault | None, second: Answer | RemoteFault | None, decides: str
) -> None:
    """The answer that has come least far."""
    expected = first if decides == "first" else second
    assert decisive([first, second]) is expected
    assert decisive([second, first]) is expected


def until(world: World, vw: int, *states: MemberState) -> None:
    """The VW steps until it is in one of ``states``."""
    for _ in range(50):
        if world.vws[vw].member.state in states:
            return
        world.step(vw)
    raise AssertionError(f"VW {vw} stays in {world.vws[vw].member.state}")


def all_idle(world: World) -> None:
    for _ in range(50):
        for vw in sorted(world.vws):
            world.step(vw)
    assert {one.member.state for one in world.vws.values()} == {MemberState.IDLE}


def started(n: int, distance: int = 0, **options: str) -> World:
    world = World(n, distance, **options)  # type: ignore[arg-type]
    all_idle(world)
    return world


def wave(world: World, *vws: int) -> None:
    for vw in vws:
        world.wave(vw)
    for _ in range(20):
        for vw in vws:
            world.step(vw)
    assert all(world.vws[vw].member.state is MemberState.IDLE for vw in vws)


def ask(world: World, message: Request, body: bytes = b"") -> Answer | RemoteFault:
    return world.deliver(COORDINATOR, message, body)[0]


def waits_for(world: World, vw: int) -> str:
    action = world.vws[vw].member.next()
    assert isinstance(action, Request)
    answer = ask(world, action)
    assert isinstance(answer, NotYet), answer
    return answer.waits_for


# How it begins.


def test_a_run_begins_when_all_are_there_with_the_weights_of_vw_0() -> None:
    world = World(3)
    until(world, 0, MemberState.JOIN)
    world.step(0)
    assert waits_for(world, 0) == "VW 1, 2 to join"
    until(world, 2, MemberState.JOIN)
    world.step(2)
    assert waits_for(world, 0) == "VW 1 to join"
    world.pass_time(100 * LEASE)  # however long the others take to start
    all_idle(world)
    for one in world.vws.values():
        got = one.weights[one.member.newest]
        assert all(torch.equal(a, b) for a, b in zip(got, world.w0, strict=True))


def least_of(world: World, least: int) -> None:
    """Have the VWs of ``world`` begin with ``least``."""
    world.signature = replace(world.signature, least=least)
    for vw in range(world.n):
        world.begin(vw, 0)
    world.w0 = [block.clone() for block in world.vws[0].weights[0]]


def test_a_run_may_begin_with_fewer_once_vw_0_is_among_them() -> None:
    world = World(4)
    least_of(world, 2)
    for vw in (1, 3):
        until(world, vw, MemberState.JOIN)
        world.step(vw)
    assert waits_for(world, 3) == "VW 0, 2 to join"
    for _ in range(20):
        for vw in (0, 1, 3):
            world.step(vw)
    commit_index = world.vws[0].member.commit_index
    assert commit_index is not None
    assert [each.vw for each in commit_index.members] == [0, 1, 3], "all that had come by then"
    wave(world, 0, 1, 3)
    until(world, 2, MemberState.JOIN)
    assert waits_for(world, 2) == "a cut at which VWs may join"


def test_fewer_than_the_fewest_wait_for_more() -> None:
    world = World(3)
    least_of(world, 2)
    until(world, 0, MemberState.JOIN)
    assert waits_for(world, 0) == "VW 1, 2 to join"


def test_a_newcomers_updates_are_divided_among_all_that_are_there() -> None:
    world = started(3, aggregate="mean")
    world.kill(2)
    world.pass_time(2 * LEASE)
    wave(world, 0, 1)
    world.begin(2, 1)
    until(world, 2, MemberState.JOIN)
    waits_for(world, 2)
    for vw in (0, 1):
        world.vws[vw].member.arrive(1, update=False, admit=True)
    all_idle(world)
    for vw in range(3):
        world.wave(vw)
        until(world, vw, MemberState.PULL)
    assert [commit.divisor for commit in granted(world, 0).tail] == [3, 3, 3]


def test_a_newer_incarnation_fences_the_older_one() -> None:
    world = started(2)
    older = world.vws[1].member
    world.begin(1, 7)
    until(world, 1, MemberState.JOIN)
    world.step(1)
    for message in (older.heartbeat(), Pushed(1, 0, older.generation, 0, False), Leave(1, 0, "")):
        answer = ask(world, message)
        assert isinstance(answer, RemoteFault)
        assert answer.refusal is Refusal.FENCED
        assert str(answer) == "VW 1 was started again, and this is the older one"


def test_a_newcomer_joins_at_a_cut_that_admits_it() -> None:
    world = started(2)
    wave(world, 0, 1)
    newcomer = world.begin(1, 1).member
    for cut, admit in ((1, False), (2, True)):
        until(world, 1, MemberState.JOIN)
        assert waits_for(world, 1) == "a cut at which VWs may join"
        world.vws[0].member.arrive(cut, update=False, admit=admit)
        until(world, 0, MemberState.IDLE)
    all_idle(world)
    assert (newcomer.clock, newcomer.cut) == (1, 2)
    wave(world, 0, 1)
    assert newcomer.clock == 2


def test_a_server_restarts_before_a_newcomer_has_pulled() -> None:
    world = started(2)
    wave(world, 0, 1)
    world.begin(1, 1)
    until(world, 1, MemberState.JOIN)
    world.step(1)
    world.restart(0)
    for _ in range(40):
        world.step(0)
        world.step(1)
        world.pass_time(LEASE / 3)
    wave(world, 0)
    assert waits_for(world, 1) == "a cut at which VWs may join"


# Waves and turns.


def test_who_dies_before_its_push_adds_nothing_and_after_it_all() -> None:
    world = started(3)
    for vw in range(3):
        world.wave(vw)
    until(world, 0, MemberState.PULL)
    until(world, 1, MemberState.PULL)
    until(world, 2, MemberState.PUSH)  # staged, and not pushed
    assert waits_for(world, 0) == "VW 2 to finish wave 0"
    world.kill(1)
    world.kill(2)
    world.pass_time(2 * LEASE)
    until(world, 0, MemberState.IDLE)
    commit_index = world.vws[0].member.commit_index
    assert commit_index is not None
    assert commit_index.included == (UpdateId(0, 0, 0), UpdateId(1, 0, 0))
    assert commit_index.members == (UpdateId(0, 0, -1),)


def departed(world: World, vw: int) -> list[tuple[int, int, str]]:
    answer = ask(world, world.vws[vw].member.heartbeat())
    assert isinstance(answer, Done), answer
    return [(each.vw, each.clock, each.why) for each in answer.departed]


SILENT = "silent for longer than its lease of 30 s (raise WSPCallback(lease=...) if it may be)"


def test_all_are_told_who_was_left_out_at_which_clock_and_why() -> None:
    """The others went on without it, and nobody ever heard of that."""
    world = started(3)
    wave(world, 0, 1, 2)
    assert departed(world, 0) == []
    world.kill(1)
    world.pass_time(2 * LEASE)
    wave(world, 0, 2)
    assert departed(world, 0) == departed(world, 2) == [(1, 1, SILENT)]
    commit_index = world.vws[0].member.commit_index
    assert commit_index is not None
    assert [update_id.vw for update_id in commit_index.members] == [0, 2]
    world.begin(2, 1)
    until(world, 2, MemberState.JOIN)
    world.step(2)
    assert departed(world, 0) == [(1, 1, SILENT), (2, 2, "started again")]
    told = ask(world, world.vws[0].member.leave())
    assert isinstance(told, Done), "and whoever leaves hears it at last"
    assert told.departed[:2] == (Departed(1, 0, 1, SILENT), Departed(2, 0, 2, "started again"))


def test_who_has_left_is_known_too_and_why_it_is_not_there() -> None:
    world = started(2)
    assert isinstance(ask(world, world.vws[1].member.leave()), Done)
    assert departed(world, 0) == [(1, 0, "")]


@pytest.mark.parametrize("server", [COORDINATOR, 1])
def test_who_does_not_come_back_after_a_server_was_lost_is_missed(server: int) -> None:
    """The coordinator that has lost its memory knows from the others' reports who was there."""
    world = started(3)
    wave(world, 0, 1, 2)
    world.kill(1)
    world.restart(server)
    for vw in (0, 2):
        world.wave(vw)
    for _ in range(40):
        for vw in (0, 2):
            world.step(vw)
        world.pass_time(LEASE / 10)
    assert [one.member.clock for one in world.vws.values()] == [2, 2]
    assert departed(world, 0) == departed(world, 2) == [(1, 1, SILENT)]


def test_with_a_distance_commits_and_turns_take_turns() -> None:
    world = started(3, 5)
    world.wave(0)
    until(world, 0, MemberState.READ)  # a turn of VW 0 runs
    world.wave(1)
    until(world, 1, MemberState.PULL)  # VW 1's update waits for it
    assert waits_for(world, 1) == "VW 0 to take weights"
    world.wave(2)
    until(world, 2, MemberState.PULL)  # and so does VW 2's; no new turn until both are added
    assert waits_for(world, 2) == "VW 0 to take weights"
    until(world, 0, MemberState.IDLE)
    until(world, 1, MemberState.READ)
    until(world, 2, MemberState.READ)
    assert world.vws[1].member.next() is not None
    all_idle(world)


def test_a_turn_ends_with_its_vws_lease() -> None:
    world = started(2, 5)
    world.wave(0)
    until(world, 0, MemberState.READ)
    world.kill(0)
    world.wave(1)
    until(world, 1, MemberState.PULL)
    world.pass_time(2 * LEASE)
    until(world, 1, MemberState.IDLE)


def test_what_a_turn_has_read_is_not_used_once_the_others_went_on() -> None:
    world = started(2, 5)
    world.wave(0)
    until(world, 0, MemberState.PULLED)
    world.vws[0].heartbeats = False
    world.pass_time(2 * LEASE)
    wave(world, 1)
    with pytest.raises(RemoteFault, match=re.escape(f"VW 0 was {SILENT}")) as caught:
        world.step(0)
    assert caught.value.refusal is Refusal.LEFT_OUT


def test_the_size_of_a_wave_is_that_of_its_beginning() -> None:
    world = started(3, aggregate="mean")
    for vw in (0, 1):
        world.wave(vw)
        until(world, vw, MemberState.PULL)
    world.kill(2)  # in wave 0, which has begun with three
    world.pass_time(2 * LEASE)
    world.step(0)
    assert [commit.divisor for commit in granted(world, 0).tail] == [3, 3]
    all_idle(world)
    for vw in (0, 1):
        world.wave(vw)
    until(world, 0, MemberState.PULL)
    until(world, 1, MemberState.PULL)
    assert [commit.divisor for commit in granted(world, 0).tail] == [2, 2]


def granted(world: World, vw: int) -> Granted:
    member = world.vws[vw].member
    answer = ask(world, Pull(vw, member.incarnation, member.generation, member.read_lease))
    assert isinstance(answer, Granted), answer
    return answer


@pytest.mark.parametrize("distance", [0, 2])
def test_vw_0_asks_for_a_cut_and_all_know_in_time(distance: int) -> None:
    world = started(2, distance)
    wave(world, 0, 1)
    world.wave(0, ask_cut=True)
    until(world, 0, MemberState.PULL)
    while world.vws[1].member.clock < 2 + distance:  # VW 1 goes on for as long as it may
        world.wave(1)
        until(world, 1, MemberState.IDLE)
    assert world.vws[1].member.cut_at == 2 + distance


def test_a_wish_that_is_repeated_does_not_put_a_cut_off() -> None:
    """Each wave's wish had moved the cut on, so that it never came with D > 0."""
    world = started(2, 2)
    for _ in range(2):
        world.wave(0, ask_cut=True)
        until(world, 0, MemberState.IDLE)
    assert world.vws[0].member.cut_at == 3


def test_one_that_was_told_to_end_has_left_and_the_others_hear_why() -> None:
    world = started(3)
    wave(world, 0, 1, 2)
    assert isinstance(ask(world, Leave(2, world.vws[2].member.incarnation, "", "told to end")), Done)
    wave(world, 0, 1)  # at once, and not after its lease
    assert departed(world, 0) == [(2, 1, "told to end")]


# Cuts and gathers.


def test_a_vw_at_a_later_cut_holds_up_neither_waves_nor_cuts_nor_gathers() -> None:
    world = started(3)
    wave(world, 0, 1, 2)
    world.wave(2, cut=5)  # a short wave
    until(world, 2, MemberState.ARRIVE)
    wave(world, 0, 1)
    assert waits_for(world, 2) == "VW 0, 1 to come to cut 5"
    for vw in (0, 1):
        world.wave(vw, cut=3)
    for _ in range(12):
        for vw in range(3):
            world.step(vw)
    assert [one.member.cut for one in world.vws.values()] == [3, 3, 0]
    assert world.vws[2].member.state is MemberState.ARRIVE
    for vw in (0, 1):
        world.gather(vw, 0, bytes([vw]))
        world.step(vw)
    for _ in range(4):
        world.step(0)
        world.step(1)
    assert world.vws[0].member.gathered == Gathered(3, 0, (GatherPart(0, 1), GatherPart(1, 1)))
    assert world.vws[0].kept == b"\0\1"
    for vw in (0, 1):
        world.wave(vw, cut=5)
    all_idle(world)
    assert {(one.member.cut, one.member.clock) for one in world.vws.values()} == {(5, 4)}
    world.check_end()


def test_clocks_of_the_dead_count_at_a_cut() -> None:
    """A cut once took the largest clock of the living, so that a wave had updates from both sides of the cut."""
    world = started(2)
    wave(world, 0, 1)
    world.wave(0, cut=1, update=False)
    until(world, 0, MemberState.ARRIVE)
    world.step(0)
    wave(world, 1)
    world.kill(1)
    world.pass_time(2 * LEASE)
    until(world, 0, MemberState.IDLE)
    assert world.vws[0].member.clock == 2


def test_a_gather_goes_on_without_whoever_dies() -> None:
    world = started(3)
    for vw in (0, 1):
        world.gather(vw, 0, bytes([vw]))
        world.step(vw)
    assert waits_for(world, 0) == "VW 2 in gather (0, 0)"
    world.kill(2)
    world.pass_time(2 * LEASE)
    all_idle(world)
    assert world.vws[1].kept == b"\0\1"


@pytest.mark.parametrize("distance", [0, 2])
def test_who_waits_for_each_other_in_a_circle_is_told_so(distance: int) -> None:
    """VW 1 gathers where VW 0 has a wave to come, for which it waits as soon as it is too far ahead: for ever."""
    world = started(2, distance)
    world.gather(1, 0, b"")
    world.step(1)
    for _ in range(distance):
        wave(world, 0)
    world.wave(0)
    with pytest.raises(
        PeerFailed, match=r"each other; .* on each: VW 0 for VW 1 to finish wave 0; VW 1 for VW 0 in ga"
    ):
        until(world, 0, MemberState.IDLE)
    with pytest.raises(PeerFailed, match="all virtual workers wait for each other"):
        world.step(1)


def test_a_result_that_one_vw_has_survives_the_coordinator() -> None:
    world = started(2)
    for vw in (0, 1):
        world.gather(vw, 0, bytes([vw + 65]))
        world.step(vw)
    until(world, 0, MemberState.IDLE)  # VW 0 has the result, VW 1 has not heard of it
    world.restart(0)
    world.gather(0, 1, b"next")
    for _ in range(30):
        world.step(0)
        world.step(1)
    assert world.vws[1].member.gathered == Gathered(0, 0, (GatherPart(0, 1), GatherPart(1, 1)))
    assert world.vws[1].kept == b"AB"
    world.gather(1, 1, b"too")
    all_idle(world)
    assert world.vws[1].kept == b"nexttoo"


def test_a_part_that_is_too_large_or_late_is_refused() -> None:
    world = started(2)
    world.server[0].coordinator._gathers.limit = 10
    here = (0, 0, world.vws[0].member.generation)
    answer = ask(world, Gather(*here, 0, 0), b"x" * 11)
    assert isinstance(answer, RemoteFault)
    assert answer.refusal is Refusal.TOO_LARGE
    for ordinal in (0, 1):
        for vw in (0, 1):
            answer = ask(world, Gather(vw, *here[1:], 0, ordinal), b"x")
        assert isinstance(answer, Gathered)
    answer = ask(world, Gather(*here, 0, 0), b"x")
    assert isinstance(answer, RemoteFault)
    assert answer.refusal is Refusal.STALE


# What is lost, and what is not.


def test_what_only_the_dead_held_is_reported() -> None:
    world = started(2, 3)
    wave(world, 1)
    wave(world, 1)
    world.restart(1)
    world.kill(1)  # together with a shard: VW 0 has nothing but w_0
    world.wave(0)
    for _ in range(12):
        world.step(0)
        world.pass_time(LEASE / 3)
    until(world, 0, MemberState.IDLE)
    assert world.vws[0].lost == [Lost(1, 0, 0, 1)]


def test_servers_are_rebuilt_from_the_newest_pull() -> None:
    """VW 1's pull includes the waves of both VWs. With VW 0's older pull, the wave of VW 1 would be lost."""
    world = started(2, 3)
    wave(world, 0)
    wave(world, 1)
    newest = max(one.member.commit_index.age for one in world.vws.values() if one.member.commit_index is not None)
    joins = {
        vw: Join(vw, 0, 0, world.signature, replace(Report(), commit_index=one.member.commit_index), ("", ""))
        for vw, one in world.vws.items()
    }
    assert len({join.report.commit_index for join in joins.values()}) == 2
    found = newest_pull(joins)
    assert found is not None
    assert found.age == newest
    assert newest_pull({vw: replace(join, report=Report()) for vw, join in joins.items()}) is None


def test_what_a_restarted_coordinator_cannot_know_is_reported_as_unknown() -> None:
    world = started(2)
    wave(world, 0, 1)
    world.kill(1)
    world.restart(0)
    world.wave(0)
    for _ in range(12):
        world.step(0)
        world.pass_time(LEASE / 3)
    until(world, 0, MemberState.IDLE)
    assert world.vws[0].lost == [Lost(1, 0, 1, -1)]


def test_a_report_that_comes_late_does_not_begin_a_generation() -> None:
    """VW 1's former report, repeated by the network, once made a restarted coordinator begin with older weights than
    VW 1 had seen; VW 0 went on from there, and VW 1's update, which VW 1 no longer kept, was lost without a word."""
    world = started(2, 1)
    world.restart(0)
    beat_until_idle(world)
    former = [message for _, message, _ in world.sent if isinstance(message, Join) and message.vw == 1][-1]
    wave(world, 1)
    for server in (0, 1):
        world.restart(server)
    world.wave(0)
    until(world, 0, MemberState.JOIN)
    world.step(0)
    ask(world, former)
    until(world, 0, MemberState.PULL)  # it has loaded its weights, and pushed its update
    assert waits_for(world, 0) == "VW 1 to take note that servers were lost"
    beat_until_idle(world)
    world.finish()


def beat_until_idle(world: World) -> None:
    for _ in range(40):
        for vw in sorted(world.vws):
            world.heartbeat(vw)
            world.step(vw)
    assert {one.member.state for one in world.vws.values()} == {MemberState.IDLE}


# How it ends.


def test_a_failure_is_told_to_all_with_its_reason() -> None:
    world = started(2)
    assert isinstance(ask(world, Leave(1, 0, "ValueError: bad batch")), Done)
    with pytest.raises(PeerFailed, match="VW 1 failed: ValueError: bad batch"):
        wave(world, 0)
    answer = ask(world, Heartbeat(0, 0, "any"))
    assert isinstance(answer, RemoteFault)
    assert answer.refusal is Refusal.FAILED
    assert not world.server[0].coordinator.finished(world.now)
    ask(world, Leave(0, 0, ""))
    assert world.server[0].coordinator.finished(world.now)


@pytest.mark.parametrize("restarted", ["nothing", "the server", "the server, which waits for one"])
def test_a_failure_of_one_that_is_no_member_does_not_concern_the_others(restarted: str) -> None:
    """It ended all where a new server had not heard of VW 1, or where VW 1 was coming back."""
    world = started(3)
    wave(world, 0, 1, 2)
    del world.vws[1]
    world.pass_time(LEASE + 1)
    wave(world, 0, 2)
    if restarted != "nothing":
        world.restart(0)
        world.heartbeat(0)
        until(world, 0, MemberState.JOIN)
        world.step(0)
    if restarted == "the server":
        beat_until_idle(world)
    for incarnation in (0, 5):
        ask(world, Leave(1, incarnation, "ValueError: of long ago"))
    beat_until_idle(world)
    wave(world, 0, 2)


@pytest.mark.parametrize("has_pushed", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_new_server_learns_which_incarnations_there_were(early: bool, has_pushed: bool) -> None:
    """One with a smaller number, by another machine's clock, became a member, and what it pushed was never added.

    One that had been a member, and had pushed nothing yet, was not told of, so that the next one took its number, and
    was refused as that one.
    """
    world = World(2)
    world.begin(1, 9)
    all_idle(world)
    if has_pushed:
        wave(world, 0, 1)
    world.kill(1)
    if has_pushed:
        world.pass_time(LEASE + 1)
        wave(world, 0)
    world.restart(0)
    if early:
        world.begin(1, 5)
        until(world, 1, MemberState.JOIN)
        world.step(1)
        del world.vws[1]
    if not has_pushed:  # VW 0 has taken no weights since then, and VW 1 is waited for
        world.heartbeat(0)
        until(world, 0, MemberState.JOIN)
        world.step(0)
        world.pass_time(LEASE + 1)
    beat_until_idle(world)
    answer = ask(world, Heartbeat(1, 5, world.server[0].coordinator.generation))
    assert isinstance(answer, RemoteFault)
    assert answer.refusal is Refusal.FENCED
    assert world.server[0].coordinator.status(world.now)["incarnations"]["1"] == 9
    wave(world, 0)


def test_who_has_left_is_not_waited_for_and_may_say_so_twice() -> None:
    world = started(2)
    wave(world, 0, 1)
    for _ in range(2):
        assert isinstance(ask(world, world.vws[1].member.leave()), Done)
    del world.vws[1]
    wave(world, 0)
    world.restart(0)
    assert ask(world, Leave(1, 0, "")) == Done()  # even to a coordinator that does not know it


def test_the_status_tells_clocks_and_leases() -> None:
    world = started(2, 1)
    world.wave(0)
    all_idle(world)
    world.wave(1, cut=4, update=False)
    until(world, 1, MemberState.ARRIVE)
    world.step(1)
    world.now += 1.5
    world.heartbeat(0)
    status = world.server[0].coordinator.status(world.now)
    members = [
        {"vw": 0, "clock": 1, "lag": 0, "waits_at_cut": False, "silent_ms": 0, "incarnation": 0},
        {"vw": 1, "clock": 0, "lag": None, "waits_at_cut": True, "silent_ms": 1500, "incarnation": 0},
    ]
    assert status == {
        "epoch": "epoch1",
        "phase": "running",
        "generation": "epoch1.1",
        "slowest": 1,
        "commits": 1,
        "members": members,
        "settings": [],
        "newcomers": [],
        "asked": {},
        "incarnations": {"0": 0, "1": 0},
    }  # fmt: skip


# Who is at fault.


def test_what_makes_no_sense_is_refused_and_changes_nothing() -> None:
    world = started(2)
    me = (1, 0, world.vws[1].member.generation)
    elsewhere = CommitIndex(1, 0, (), (UpdateId(0, 0, -1),))
    report = replace(Report(), term=1, commit_index=elsewhere)
    cases: list[tuple[Request, Refusal | None]] = [
        (Pushed(*me, 1, False), Refusal.MALFORMED),  # wave 0 comes first
        (Pulled(*me, 99), Refusal.STALE),
        (Loaded(*me), None),  # said again
        (Heartbeat(1, 0, "elsewhere"), Refusal.GENERATION),
        (Heartbeat(1, 1, me[2]), Refusal.GENERATION),
        (Heartbeat(7, 0, me[2]), Refusal.MALFORMED),
        (Leave(7, 0, "ValueError: in no launch of ours"), Refusal.MALFORMED),
        (Arrive(*me, -1, False), None),  # it has passed that one
        (Join(2, 0, 1, world.signature, Report(), ("", "")), Refusal.MALFORMED),
        (Join(1, 0, 9, world.signature, report, ("", "")), Refusal.MALFORMED),
        (Join(1, 0, 9, world.signature, Report(), ()), Refusal.MALFORMED),
        (Join(1, 0, 0, world.signature, Report(), ("", "")), Refusal.STALE),
    ]
    for message, refusal in cases:
        answer = ask(world, message)
        assert (answer.refusal if isinstance(answer, RemoteFault) else None) is refusal, message
    wave(world, 0, 1)
    world.check_end()


def test_a_vw_may_not_push_twice_without_a_pull() -> None:
    world = started(2, 3)
    world.wave(1)
    until(world, 1, MemberState.PULL)
    answer = ask(world, Pushed(1, 0, world.vws[1].member.generation, 1, False))
    assert isinstance(answer, RemoteFault)
    assert str(answer) == "VW 1 cannot push wave 1 now"


@pytest.mark.parametrize(
    "call",
    [
        lambda member: member.join(),
        lambda member: member.synchronise(),
        lambda member: member.arrive(1, update=False),
        lambda member: member.gather(0),
        lambda member: member.lose(),
    ],
)
def test_a_member_does_one_thing_at_a_time(call: Callable[[Member], None]) -> None:
    world = started(1)
    world.wave(0)
    with pytest.raises(LocalFault):
        call(world.vws[0].member)
    all_idle(world)
    with pytest.raises(LocalFault, match="cut 0 comes after cut 0"):
        world.vws[0].member.arrive(0, update=False)


def test_an_answer_to_another_question_is_the_servers_fault() -> None:
    world = started(1)
    world.wave(0)
    until(world, 0, MemberState.PUSH)
    with pytest.raises(RemoteFault, match="a Joined was answered to a VW in state 'push'"):
        world.vws[0].member.heard(Joined("g", CommitIndex(1, 0, (), ()), 0, 0, ()))


FIRST = replace(signature(2), parameters=(parameter("layer0.weight"), parameter("layer1.weight")))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (FIRST, None),
        (replace(FIRST, version="9.9"), "version: '9.9' instead of '0.1.0'"),
        (replace(FIRST, clock_distance=3), "clock distance: 3 instead of 0"),
        (replace(FIRST, settings=("wave=4",)), "settings: wave=4 instead of "),
        (replace(FIRST, parameters=FIRST.parameters[:1]), "parameter 'layer1.weight' is missing"),
        (
            replace(FIRST, parameters=(*FIRST.parameters, parameter("more"))),
            "parameter 'more' is not known to the others",
        ),
        (replace(FIRST, parameters=FIRST.parameters[::-1]), "the order of the parameters"),
        (
            replace(FIRST, parameters=(FIRST.parameters[0], parameter("layer1.weight", [4], "float64"))),
            "parameter 'layer1.weight' is float64 [4] instead of float32 [3]",
        ),
        (
            replace(FIRST, parameters=(FIRST.parameters[0], parameter("layer1.weight", [3], "float32", "bfloat16"))),
            "parameter 'layer1.weight' is float32 [3] sent as bfloat16 instead of float32 [3]",
        ),
    ],
)
def test_what_differs_between_two_vws_is_named(other: TrainingSignature, what: str | None) -> None:
    assert difference(FIRST, other) == what
    coordinator = Coordinator("e", LEASE)
    coordinator.handle(Join(0, 0, 1, FIRST, Report(), ("", "")), 0.0)
    join = Join(1, 0, 1, other, Report(), ("",) * 2)
    if what is None:
        coordinator.handle(join, 0.0)
        return
    with pytest.raises(RemoteFault, match=re.escape(what)) as caught:
        coordinator.handle(join, 0.0)
    assert caught.value.refusal is Refusal.SIGNATURE


def test_content_is_refused_before_memory_is_taken_for_it_unless_a_member_leaves_it() -> None:
    coordinator = Coordinator("e", LEASE)
    content = KeepBytes(0, 1, "checkpoint")
    with pytest.raises(RemoteFault):
        coordinator.check(content, 1 << 40, 0.0)
    coordinator.handle(Join(0, 1, 1, FIRST, Report(), ("", "")), 0.0)
    coordinator.check(content, 1 << 40, 0.0)


def test_whoever_leaves_in_the_name_of_one_that_was_left_out_fences_none_of_its_processes() -> None:
    """One that had been stopped was told that it was the older one, and failed; it may come back."""
    coordinator = Coordinator("e", LEASE)
    for vw in range(2):
        coordinator.handle(Join(vw, 1, 1, FIRST, Report(), ("", "")), 0.0)
    for quarter in range(1, 6):  # VW 1 is silent
        later = quarter * LEASE / 4
        coordinator.handle(Join(0, 1, 1, FIRST, Report(), ("", "")), later)
    assert [each["vw"] for each in coordinator.status(later)["members"]] == [0]
    with pytest.raises(RemoteFault) as caught:
        coordinator.handle(Leave(1, 1 << 62, "ValueError: of another launch"), later)
    assert caught.value.refusal is Refusal.GENERATION
    assert isinstance(coordinator.handle(Join(1, 2, 1, FIRST, Report(), ("", "")), later)[0], Answer)
