"""Meeting of virtual workers at the coordinator: they learn of the other servers, and see each other off."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_hetpipe import WSPCallback, errors
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch.ranks import Rank, Role
from lightning_hetpipe.launch.servers import FoundServers, LaunchSettings
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.server.process import client
from lightning_hetpipe.server.process.client import NotJoined
from lightning_hetpipe.server.process.sessions import Sessions
from lightning_hetpipe.server.process.waits import ServersSilent
from lightning_hetpipe.server.protocol.identifiers import PeerFailed
from lightning_hetpipe.server.transport.grpc_server import GrpcServer
from lightning_hetpipe.server.transport.security import Security
from lightning_hetpipe.workers import group as module
from lightning_hetpipe.workers import join_handshake
from lightning_hetpipe.workers.group import Group

SECONDS = 30.0
LEASE = 2.0


def launch_of(index: int, size: int, settings: WSPSettings, timeout: float = SECONDS) -> LaunchSettings:
    """A virtual worker of one machine."""
    return LaunchSettings(Rank(index, size, 0, index, size, 1, Role.FIRST), LightningEnvironment(), settings, timeout)


def group_of(index: int, size: int, found: FoundServers, settings: WSPSettings, timeout: float = SECONDS) -> Group:
    return Group(launch_of(index, size, settings, timeout), found)


def close(group: Group, failure: str = "") -> None:
    """Leaves as a program does: when all virtual workers leave, or at once with a ``failure``."""
    try:
        if not failure:
            group.leave_fit()
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        group.part(failure)


class Pair:
    """Two virtual workers, each beside its server, as on two machines; their calls run in threads."""

    def __init__(
        self, exits: ExitStack, monkeypatch: pytest.MonkeyPatch, placement: str = "size", known: int = 2
    ) -> None:
        # Each process counts rooms for itself; here both are in one.
        monkeypatch.setattr(module, "next_session", lambda kind: f"{kind}-1")
        self.rooms = [Sessions(LEASE), Sessions(LEASE)]
        for rooms in self.rooms:
            exits.callback(rooms.close)
        self.servers = [exits.enter_context(GrpcServer(rooms)) for rooms in self.rooms]
        self.addresses = [server.address for server in self.servers]
        settings = WSPCallback(lease=LEASE, placement=placement).settings
        self.found = [
            FoundServers(self.addresses[0], (address,) if index < known else (), Security(), hosts=True)
            for index, address in enumerate(self.addresses)
        ]
        self.groups = [group_of(index, 2, found, settings) for index, found in enumerate(self.found)]
        self.threads = exits.enter_context(ThreadPoolExecutor(2))
        for opened in [self.threads.submit(group.open) for group in self.groups]:
            opened.result(SECONDS)

    def renew(self, given: Sequence[WSPCallback], timeout: float = SECONDS) -> None:
        """A later Trainer of the program's, in each of them."""
        renewed = [
            self.threads.submit(group.renew, launch_of(group.index, 2, wsp.settings, timeout), found)
            for group, found, wsp in zip(self.groups, self.found, given, strict=True)
        ]
        for each in renewed:
            each.result(SECONDS)

    def enter_fit(self, *values: float) -> None:
        """With so many parameters of three numbers."""
        named = [(f"p{index}", torch.full((3,), value)) for index, value in enumerate(values)]
        for entered in [self.threads.submit(group.enter_fit, named, ()) for group in self.groups]:
            assert [tensor.tolist() for tensor in entered.result(SECONDS)] == [[value] * 3 for value in values]

    def close(self) -> None:
        for closed in [self.threads.submit(close, group) for group in self.groups]:
            closed.result(SECONDS)


@pytest.fixture
def exits() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(("placement", "beside"), [("size", {"fit-1"}), ("local", set())])
def test_all_servers_share_the_weights(
    placement: str, beside: set[str], exits: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With placement="local" the second one is never asked: it may be lost."""
    pair = Pair(exits, monkeypatch, placement)
    pair.enter_fit(1.0, 2.0)
    assert pair.rooms[0].status().keys() == {"sessions", "lease", "talk-1", "fit-1"}
    assert pair.rooms[1].status().keys() == {"sessions", "lease", *beside}
    pair.close()


def test_a_later_trainer_may_place_parameters_on_servers_that_the_first_did_not_start(
    exits: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its placement was taken, but over the servers that the first one had known."""
    pair = Pair(exits, monkeypatch, "local", known=1)
    pair.enter_fit(1.0, 2.0)
    for left in [pair.threads.submit(group.leave_fit) for group in pair.groups]:
        left.result(SECONDS)
    monkeypatch.setattr(module, "next_session", lambda kind: f"{kind}-2")
    pair.found = [replace(found, known=(address,)) for found, address in zip(pair.found, pair.addresses, strict=True)]
    pair.renew([WSPCallback(lease=LEASE, placement="round_robin")] * 2)
    pair.enter_fit(1.0, 2.0)
    held = [rooms.status()["fit-2"]["held_bytes"] for rooms in pair.rooms]
    assert held == [12, 12]
    pair.close()


def test_a_later_trainers_timeout_holds(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's held for all of the program."""
    monkeypatch.setattr(client, "TIME_TO_LEAVE", 0.1)
    pair = Pair(exits, monkeypatch)
    pair.renew([WSPCallback(lease=LEASE)] * 2, timeout=0.3)
    pair.servers[0].__exit__()
    with pytest.raises(ServersSilent, match=r"waited for 0\.3 s for an answer"):
        pair.groups[1].gather(1, "a test")
    for group in pair.groups:
        group.part("ServersSilent")


@pytest.mark.parametrize(
    ("shares", "end"), [("equal", "is_global_zero:`"), ([2, 5], "where shares give them other numbers of batches")]
)
def test_other_calls_than_others_made_are_named(
    shares: Any, end: str, exits: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(exits, monkeypatch)
    pair.renew([WSPCallback(lease=LEASE, shares=shares)] * 2)
    calls = [
        pair.threads.submit(group.gather, None, what)
        for group, what in zip(pair.groups, ("all_gather", "the end of a run"), strict=True)
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=rf"called .*all_gather.* only some make, .*{end}$"):
            call.result(SECONDS)
    pair.close()


@pytest.mark.parametrize(
    ("first", "later", "said"),
    [
        ({}, {"servers": ["a:1"]}, r"servers=\['a:1'\], but an earlier Trainer of this program had servers=None"),
        ({"servers": ["a:1"]}, {}, r"servers=None, but an earlier Trainer of this program had servers=\['a:1'\]"),
        ({"servers": ["a:1"]}, {"servers": ["a:1", "b:2"]}, r"servers=\['a:1', 'b:2'\], but an earlier Trainer"),
        ({}, {"security": {"token": "hushed"}}, "security differs from what an earlier Trainer of this program had"),
    ],
)
def test_a_later_trainer_with_other_servers_is_refused(first: dict[str, Any], later: dict[str, Any], said: str) -> None:
    """It went on with the first one's without a word, or some of its virtual workers knew of none."""
    settings = WSPCallback(**first).settings
    settings.check_later(WSPCallback(**first, clock_distance=2, placement="local", lease=7).settings)
    with pytest.raises(SettingError, match=said) as refused:
        settings.check_later(WSPCallback(**later).settings)
    assert "hushed" not in str(refused.value)


def test_a_lease_that_is_not_the_servers_is_refused(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats would come too late, and a virtual worker be left out while it computes."""
    pair = Pair(exits, monkeypatch)
    first = pair.groups[0]
    pair.renew([WSPCallback(lease=3 * LEASE)] * 2)  # as a program's second Trainer may have it
    with pytest.raises(SettingError, match=f"lease={3 * LEASE:g}, but the server at .* has lease={LEASE:g}; give both"):
        first.enter_fit([("a", torch.ones(3))], ())
    pair.close()


@pytest.mark.parametrize("failure", ["", "ValueError: a bad batch"])
def test_who_has_a_server_stays_until_the_others_have_left(
    failure: str, exits: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(exits, monkeypatch)
    first, second = pair.groups
    asked = threading.Event()
    status = Sessions.status

    def noted(rooms: Sessions) -> dict[str, object]:
        asked.set()
        return status(rooms)

    monkeypatch.setattr(Sessions, "status", noted)
    going = threading.Event()
    second._exits.callback(going.wait, SECONDS)  # what it does first where it leaves
    assert second._launch is not None
    leave = second._launch.leave

    def leaving(failure: str = "", why: str = "") -> None:  # of two that fail, who is first to say so is open
        if failure:
            going.wait(SECONDS)
        leave(failure, why)

    monkeypatch.setattr(second._launch, "leave", leaving)
    closed = [pair.threads.submit(close, group, failure) for group in (first, second)]
    assert asked.wait(SECONDS), "the first one has left, and looks whether the other one has"
    assert not closed[0].done()
    going.set()
    for each in closed:
        each.result(SECONDS)


def test_who_fails_waits_a_lease_at_most(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one computes on, and its heart beats: it knows by then, and ends when it comes to look."""
    pair = Pair(exits, monkeypatch)
    pair.threads.submit(close, pair.groups[0], "ValueError: a bad batch").result(SECONDS)
    with pytest.raises(Exception, match="VW 0 failed: ValueError: a bad batch"):
        pair.groups[1].gather(1, "a test")
    close(pair.groups[1], "PeerFailed")


def test_who_fails_alone_tells_why_and_its_server_stays_for_the_others(
    exits: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others learned of it by the lease, in other words; and its server, which ended with it, stopped them all."""
    pair = Pair(exits, monkeypatch)
    pair.enter_fit(1.0, 2.0)
    first, second = pair.groups
    told = list[tuple[int, str, str, str]]()
    monkeypatch.setattr(first._departures, "_on_loss", lambda *what: told.append(what))
    parted = pair.threads.submit(second.part, why="unable to go on, as its host has ended")
    update = [torch.ones(3), torch.ones(3)]
    merged = pair.threads.submit(first.weights.synchronise, update).result(SECONDS)
    assert [tensor.tolist() for tensor in merged] == [[2.0] * 3, [3.0] * 3]
    why = "was unable to go on, as its host has ended"
    said = f"virtual worker 1 is lost after 0 waves: it {why}; the others go on without it"
    assert told == [(1, "virtual worker 1", why, said)]
    assert not parted.done()
    close(first)
    parted.result(SECONDS)


def test_two_launches_at_once_at_one_server(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one fenced the first one's virtual workers, which ended, or was refused and ended them."""
    pair = Pair(exits, monkeypatch)
    monkeypatch.setattr(join_handshake, "LEASES_TO_END", 0.5)
    other = group_of(
        0, 3, FoundServers(pair.groups[0].coordinator, (), Security(), launch="other"), pair.groups[0].settings, 9
    )
    with pytest.raises(SettingError, match="serves another launch; wait until that has ended, or start servers for"):
        other.open()
    other.part("SettingError")
    both = [pair.threads.submit(group.gather, group.index, "a test") for group in pair.groups]
    assert [each.result(SECONDS) for each in both] == [[0, 1], [0, 1]]
    pair.close()


def test_launches_share_no_server_that_holds_weights(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each took the other's weights for its own that were lost, in turns, where that was not the coordinator."""
    monkeypatch.setattr(join_handshake, "LEASES_TO_END", 0.0)
    rooms = [Sessions(LEASE) for _ in range(3)]
    for each in rooms:
        exits.callback(each.close)
    one, other, shared = (exits.enter_context(GrpcServer(each)).address for each in rooms)
    settings = WSPCallback(lease=LEASE).settings
    named = [(name, torch.ones(3)) for name in "ab"]

    def opened(launch: str, room: int, *servers: str) -> Group:
        monkeypatch.setattr(module, "next_session", lambda kind: f"{kind}-{room}")
        group = group_of(0, 1, FoundServers(servers[0], servers, Security(), launch=launch), settings)
        exits.callback(group.part)
        group.open()
        return group

    first = opened("first", 1, one, shared)
    first.enter_fit(named, ())
    generation = first.weights.member.generation
    for room, servers in [(1, (other, shared)), (1, (shared, other)), (2, (one, other))]:
        second = opened("second", room, *servers)
        busy = one if one in servers else shared
        with pytest.raises(
            SettingError, match=f"the server at {busy} serves another launch; wait until that has ended"
        ):
            second.enter_fit(named, ())
        second.part()
    update = first.weights.update_buffers()
    for tensor in update:
        tensor.fill_(1.0)
    assert [tensor.tolist() for tensor in first.weights.synchronise(update)] == [[2.0] * 3] * 2
    assert first.weights.member.generation == generation, "a server was thought to be lost"
    first.part()
    second = opened("second", 1, other, shared)
    assert [tensor.tolist() for tensor in second.enter_fit(named, ())] == [[1.0] * 3] * 2


def test_a_launch_waits_for_the_end_of_one_that_was_killed(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(exits, monkeypatch)
    for group in pair.groups:
        assert group._launch is not None
        group._launch.close()
        group._exits.pop_all()
    found = replace(pair.groups[0]._found, launch="the next", hosts=False)
    nexts = [group_of(index, 2, found, pair.groups[0].settings) for index in (0, 1)]
    for opened in [pair.threads.submit(group.open) for group in nexts]:
        opened.result(SECONDS)
    for closed in [pair.threads.submit(close, group) for group in nexts]:
        closed.result(SECONDS)


def test_nobody_at_the_coordinators_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "NOTICE_AFTER", 0.05)
    monkeypatch.setattr(client, "TIME_TO_LEAVE", 0.1)
    found = FoundServers("127.0.0.1:1", (), Security())
    group = group_of(1, 2, found, WSPCallback(lease=LEASE).settings, 0.3)
    with pytest.raises(ServersSilent) as silent:
        group.open()
    close(group, "ServersSilent")
    said = str(silent.value)
    assert said.startswith(
        "VW 1, in state 'hello', has waited for 0.3 s for an answer: the server at 127.0.0.1:1 cannot"
    )
    assert said.endswith("is the program running that starts the server at 127.0.0.1:1, and may this machine reach it?")
    told = capsys.readouterr().err
    assert told == "hetpipe: virtual worker 1 waits until all 2 have come (at the server 127.0.0.1:1).\n"


def test_who_does_not_come_is_named_and_ends_the_wait_of_all(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """They waited for an hour. The first whose time is up ends it for those, too, that came later."""
    monkeypatch.setattr(module, "next_session", lambda kind: f"{kind}-1")
    rooms = Sessions(LEASE)
    exits.callback(rooms.close)
    server = exits.enter_context(GrpcServer(rooms))
    found = FoundServers(server.address, (), Security(), of_nodes=(2, 2, 2))
    impatient, patient = (WSPCallback(lease=LEASE, join_timeout=seconds).settings for seconds in (0.3, SECONDS))
    threads = exits.enter_context(ThreadPoolExecutor(2))
    groups = [group_of(index, 6, found, settings) for index, settings in ((1, patient), (4, impatient))]
    opening = [threads.submit(group.open) for group in groups]
    with pytest.raises(NotJoined) as late:
        opening[1].result(SECONDS)
    with pytest.raises(PeerFailed, match="VW 4 failed: NotJoined: VW 4 has waited"):
        opening[0].result(SECONDS)
    said = str(late.value)
    assert said.startswith("VW 4 has waited 0.3 s for VW 0 (node 0), ")
    assert "VW 2 (node 1), VW 3 (node 1), VW 5 (node 2) to join; look at what happened" in said
    assert said.endswith("WSPCallback(join_timeout=...)")
    for group in groups:
        group.part("NotJoined")
