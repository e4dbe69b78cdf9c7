"""How virtual workers meet at the coordinator, learn of the other servers, and see each other off."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from lightning_hetpipe import WSPCallback
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.client import ServersSilent
from lightning_hetpipe.server.grpc_server import GrpcServer
from lightning_hetpipe.server.rooms import Rooms
from lightning_hetpipe.server.security import Security
from lightning_hetpipe.strategy import group as module
from lightning_hetpipe.strategy.group import Group
from lightning_hetpipe.strategy.servers import Found

SECONDS = 30.0
LEASE = 2.0


class Pair:
    """Two virtual workers, each beside its server, as on two machines; their calls run in threads."""

    def __init__(self, exits: ExitStack, monkeypatch: pytest.MonkeyPatch, placement: str = "size") -> None:
        # Each process counts rooms for itself; here both are in one.
        monkeypatch.setattr(module, "_next_room", lambda kind: f"{kind}-1")
        self.rooms = [Rooms(LEASE), Rooms(LEASE)]
        for rooms in self.rooms:
            exits.callback(rooms.close)
        addresses = [exits.enter_context(GrpcServer(rooms)).address for rooms in self.rooms]
        settings = WSPCallback(lease=LEASE, placement=placement).settings
        self.groups = [
            Group(index, 2, Found(addresses[0], (address,), Security(), hosts=True), settings, SECONDS)
            for index, address in enumerate(addresses)
        ]
        self.threads = exits.enter_context(ThreadPoolExecutor(2))
        for opened in [self.threads.submit(group.open) for group in self.groups]:
            opened.result(SECONDS)


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
    named = [("a", torch.ones(3)), ("b", torch.full((3,), 2.0))]
    entered = [pair.threads.submit(group.enter_fit, named, ()) for group in pair.groups]
    for each in entered:
        assert [tensor.tolist() for tensor in each.result(SECONDS)] == [[1.0] * 3, [2.0] * 3]
    assert pair.rooms[0].status().keys() == {"rooms", "lease", "talk-1", "fit-1"}
    assert pair.rooms[1].status().keys() == {"rooms", "lease", *beside}
    for closed in [pair.threads.submit(group.close) for group in pair.groups]:
        closed.result(SECONDS)


def test_a_lease_that_is_not_the_servers_is_refused(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats would come too late, and a virtual worker be left out while it computes."""
    pair = Pair(exits, monkeypatch)
    first = pair.groups[0]
    first.settings = WSPCallback(lease=3 * LEASE).settings  # as a program's second Trainer may have it
    with pytest.raises(SettingError, match=f"lease={3 * LEASE:g}, but the server at .* has lease={LEASE:g}; give both"):
        first.enter_fit([("a", torch.ones(3))], ())
    first.settings = pair.groups[1].settings
    for closed in [pair.threads.submit(group.close) for group in pair.groups]:
        closed.result(SECONDS)


@pytest.mark.parametrize("failure", ["", "ValueError: a bad batch"])
def test_who_has_a_server_stays_until_the_others_have_left(
    failure: str, exits: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(exits, monkeypatch)
    first, second = pair.groups
    asked = threading.Event()
    status = Rooms.status

    def noted(rooms: Rooms) -> dict[str, object]:
        asked.set()
        return status(rooms)

    monkeypatch.setattr(Rooms, "status", noted)
    going = threading.Event()
    second._exits.callback(going.wait, SECONDS)  # what it does first where it leaves
    assert second._talk is not None
    fail = second._talk.fail

    def failing(reason: str) -> None:  # and where it leaves with a failure: of the two, who is first to say so is open
        going.wait(SECONDS)
        fail(reason)

    monkeypatch.setattr(second._talk, "fail", failing)
    closed = [pair.threads.submit(group.close, failure) for group in (first, second)]
    assert asked.wait(SECONDS), "the first one has left, and looks whether the other one has"
    assert not closed[0].done()
    going.set()
    for each in closed:
        each.result(SECONDS)


def test_who_fails_waits_a_lease_at_most(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one computes on, and its heart beats: it knows by then, and ends when it comes to look."""
    pair = Pair(exits, monkeypatch)
    pair.threads.submit(pair.groups[0].close, "ValueError: a bad batch").result(SECONDS)
    with pytest.raises(Exception, match="VW 0 failed: ValueError: a bad batch"):
        pair.groups[1].gather(1, "a test")
    pair.groups[1].close("PeerFailed")


def test_two_launches_at_once_at_one_server(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one fenced the first one's virtual workers, which ended, or was refused and ended them."""
    pair = Pair(exits, monkeypatch)
    monkeypatch.setattr(module, "LEASES_TO_END", 0.5)
    other = Group(0, 3, Found(pair.groups[0].coordinator, (), Security(), launch="other"), pair.groups[0].settings, 9)
    with pytest.raises(SettingError, match="serves another launch; wait until that has ended, or start servers for"):
        other.open()
    other.part("SettingError")
    both = [pair.threads.submit(group.gather, group.index, "a test") for group in pair.groups]
    assert [each.result(SECONDS) for each in both] == [[0, 1], [0, 1]]
    for closed in [pair.threads.submit(group.close) for group in pair.groups]:
        closed.result(SECONDS)


def test_a_launch_waits_for_the_end_of_one_that_was_killed(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(exits, monkeypatch)
    for group in pair.groups:
        assert group._talk is not None
        group._talk.close()
        group._exits.pop_all()
    found = replace(pair.groups[0]._found, launch="the next", hosts=False)
    nexts = [Group(index, 2, found, pair.groups[0].settings, SECONDS) for index in (0, 1)]
    for opened in [pair.threads.submit(group.open) for group in nexts]:
        opened.result(SECONDS)
    for closed in [pair.threads.submit(group.close) for group in nexts]:
        closed.result(SECONDS)


def test_nobody_at_the_coordinators_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "UNTIL_SAID", 0.05)
    found = Found("127.0.0.1:1", (), Security())
    group = Group(1, 2, found, WSPCallback(lease=LEASE).settings, 0.3)
    with pytest.raises(ServersSilent) as silent:
        group.open()
    group.close("ServersSilent")
    said = str(silent.value)
    assert said.startswith(
        "VW 1, in state 'hello', has waited for 0.3 s for an answer: the server at 127.0.0.1:1 cannot"
    )
    assert said.endswith("is the program running that starts the server at 127.0.0.1:1, and may this machine reach it?")
    told = capsys.readouterr().err
    assert told == "hetpipe: virtual worker 1 waits until all 2 have come (at the server 127.0.0.1:1).\n"
