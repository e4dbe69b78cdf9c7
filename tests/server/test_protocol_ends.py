"""End of a coordinator's time, and what those hear who come later."""

from __future__ import annotations

import pytest

from lightning_hetpipe.server.protocol.coordinator import Coordinator
from lightning_hetpipe.server.protocol.identifiers import PeerFailed, Refusal, RemoteFault, UpdateId
from lightning_hetpipe.server.protocol.member import MemberState
from lightning_hetpipe.server.protocol.messages import (
    Done,
    Heartbeat,
    Join,
    Leave,
    NotYet,
    Report,
)
from lightning_hetpipe.server.protocol.roster import FORGOTTEN
from tests.server.test_protocol_stories import all_idle, ask, started, until, wave
from tests.server.world import LEASE, World


def finished(world: World) -> bool:
    return world.server[0].coordinator.finished(world.now)


def begin_anew(world: World, vw: int) -> None:
    """The VW of another launch, whose weights have nothing to do with those of the one before."""
    world.begin(vw, 1)
    world.updates.clear()
    world.w0 = [block.clone() for block in world.vws[min(world.vws)].weights[0]]


def test_who_comes_back_after_all_have_gone_is_told_so() -> None:
    """A VW that was only stopped came back when the others had finished, found an empty session,
    and after a lease went on alone."""
    world = started(2)
    wave(world, 0, 1)
    stopped = world.vws.pop(1).member
    world.pass_time(LEASE + 1)
    assert not finished(world)
    ask(world, world.vws.pop(0).member.leave())
    assert finished(world)
    world.server[0].coordinator = Coordinator("later", LEASE, gone=world.server[0].coordinator.gone)
    answer = ask(world, stopped.heartbeat())
    assert isinstance(answer, RemoteFault)
    assert answer.refusal is Refusal.LEFT_OUT
    assert world.server[0].coordinator.unused
    begin_anew(world, 0)  # but a new launch is as welcome as the first one
    begin_anew(world, 1)
    all_idle(world)


def test_a_failure_is_told_to_who_comes_within_a_lease() -> None:
    world = World(3)
    until(world, 0, MemberState.JOIN)
    world.step(0)
    failed = world.server[0].coordinator
    ask(world, Leave(0, 0, "ValueError: bad batch"))
    assert not finished(world)  # the two others have still to hear of it
    until(world, 1, MemberState.JOIN)
    with pytest.raises(PeerFailed, match="VW 0 failed: ValueError: bad batch"):
        world.step(1)
    ask(world, Leave(1, 0, ""))
    world.now += LEASE / 2
    failed.tick(world.now)
    assert not finished(world)
    world.now += LEASE
    failed.tick(world.now)
    assert finished(world)


def test_a_launch_takes_the_place_of_one_that_was_killed() -> None:
    """It waited for ever for a cut at which to join, as all who could come to one were dead."""
    world = started(2)
    wave(world, 0, 1)
    world.vws.clear()
    begin_anew(world, 0)  # before the lease of VW 1 has run out
    until(world, 0, MemberState.JOIN)
    world.step(0)
    answer = ask(world, Join(0, 1, 1, world.signature, Report(), ("epoch1.1", "epoch1.1")))
    assert answer == NotYet("a cut at which VWs may join")
    begin_anew(world, 1)
    all_idle(world)
    assert {one.member.commit_index.included for one in world.vws.values() if one.member.commit_index} == {()}
    wave(world, 0, 1)
    late = ask(world, Heartbeat(1, 0, "epoch1.1"))
    assert isinstance(late, RemoteFault)
    assert late.refusal is Refusal.FENCED
    assert ask(world, Leave(1, 0, "")) != Done()  # nor does its end say anything of the new one
    assert world.server[0].coordinator.log is not None
    assert UpdateId(1, 1, -1) in world.server[0].coordinator.log.members


def test_a_launch_that_takes_another_ones_place_gathers_for_itself() -> None:
    """Its gathers are numbered as the killed one's were: it was given what those had said, or told that it is late."""
    world = started(2)
    for ordinal, said in enumerate((b"old", b"late")):
        gathered(world, ordinal, said)
    world.vws.clear()
    for vw in (0, 1):
        begin_anew(world, vw)
        until(world, vw, MemberState.JOIN)
        world.step(vw)
    all_idle(world)
    for ordinal, said in enumerate((b"new", b"next")):
        gathered(world, ordinal, said)


def gathered(world: World, ordinal: int, said: bytes) -> None:
    """Both VWs say that, and nothing else is heard."""
    for vw in (0, 1):
        world.gather(vw, ordinal, said)
        world.step(vw)
    all_idle(world)
    assert world.vws[0].kept == world.vws[1].kept == 2 * said


def test_who_was_left_out_fails_alone() -> None:
    """A VW that had been stopped for longer than its lease ended with an error, and that ended all who had gone on."""
    world = started(2)
    stopped = world.vws.pop(1).member
    world.pass_time(LEASE + 1)
    wave(world, 0)
    ask(world, stopped.leave("RemoteFault: VW 1 was silent for longer than its lease"))
    wave(world, 0)


def test_a_silence_of_all_is_held_against_nobody() -> None:
    """After a Ctrl-Z and a while all were left out: the server is in a session of its own, and had not been stopped."""
    world = started(3)
    world.kill(2)
    world.now += 5 * LEASE
    world.server[0].coordinator.tick(world.now)
    wave_of_the_living(world)
    assert not finished(world)


def wave_of_the_living(world: World) -> None:
    """They go on without the dead one, whose lease runs out while they are heard."""
    for vw in (0, 1):
        world.wave(vw)
    world.pass_time(LEASE + 1)
    all_idle(world)


def test_all_that_are_silent_for_very_long_are_gone() -> None:
    world = started(2)
    world.now += FORGOTTEN * LEASE - 1
    world.server[0].coordinator.tick(world.now)
    assert not finished(world)
    world.now += 2
    world.server[0].coordinator.tick(world.now)
    assert finished(world)
