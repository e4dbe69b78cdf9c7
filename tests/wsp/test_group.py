"""Virtual workers as a group, in threads of one process, over a real server."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from lightning_hetpipe import WSPCallback
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch import servers
from lightning_hetpipe.launch.servers import FoundServers
from lightning_hetpipe.server.process.server_process import ServerLost
from lightning_hetpipe.server.process.sessions import Sessions
from lightning_hetpipe.server.process.waits import ServersSilent
from lightning_hetpipe.server.protocol.gathers import Gathers
from lightning_hetpipe.server.protocol.identifiers import PeerFailed
from lightning_hetpipe.server.protocol.messages import Gather, Gathered, Leave, Lost, Message, decode
from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.grpc_server import GrpcServer
from lightning_hetpipe.server.transport.interface import STATUS, TIMEOUT, Room, Unreachable
from lightning_hetpipe.server.transport.security import Security
from lightning_hetpipe.workers import group, join_handshake
from lightning_hetpipe.workers.collectives import gather_in_chunks
from lightning_hetpipe.workers.group import Group
from lightning_hetpipe.workers.seats import Departures
from tests.server.transports import PATIENCE, certificates, security
from tests.workers.test_group import close, launch_of

LEASE = 1.5


@pytest.fixture(autouse=True)
def one_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process counts its rooms; here one is several virtual workers."""
    monkeypatch.setattr(group, "next_session", "{}-1".format)


def group_of(
    index: int,
    address: str,
    security: Security | None = None,
    timeout: float = PATIENCE,
) -> Group:
    found = FoundServers(address, (address,) if index == 0 else (), security or Security())
    return Group(launch_of(index, 2, WSPCallback(lease=LEASE).settings, timeout), found)


class Server:
    """A handler whose memory can be lost."""

    def __init__(self) -> None:
        self.rooms = Sessions(LEASE)
        self.starts = 1

    def restart(self) -> None:
        self.rooms.close()
        self.rooms, self.starts = Sessions(LEASE), self.starts + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rooms, name)


def befall(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[Message], None],
    after: Callable[[Message, Message], None] = lambda message, answer: None,
) -> None:
    """``before`` is told of each message before it goes out, ``after`` of its answer before that arrives."""

    class Channel(GrpcChannel):
        def call(
            self,
            method: str,
            header: bytes,
            body: Sequence[memoryview] = (),
            into: Room = (),
            timeout: float = TIMEOUT,
        ) -> bytes:
            if method == STATUS:
                return super().call(method, header, body, into, timeout)
            before(decode(header))
            answer = super().call(method, header, body, into, timeout)
            after(decode(header), decode(answer))
            return answer

    monkeypatch.setattr(join_handshake, "GrpcChannel", Channel)


def gathers(index: int, address: str) -> list[Any]:
    """Result of a virtual worker that gathers once, and leaves."""
    one = group_of(index, address)
    try:
        one.open()
        found = one.gather(index, "a test")
    except BaseException as error:
        close(one, str(error))
        raise
    close(one)
    return found


def test_nobody_leaves_before_all_have_what_the_last_gather_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """VW 0 had left when the server died and VW 1 had not got the result yet: it was alone then, and took its own
    part for everyone's: other buffers, and another `monitor`, than VW 0 had seen."""
    rooms, fetched, went_on = Server(), Event(), Event()

    def before(message: Message) -> None:
        match message:
            case Gather(vw=0) | Leave(vw=0) if fetched.is_set():
                went_on.set()

    def after(message: Message, answer: Message) -> None:
        match message, answer:
            case Gather(vw=0), Gathered():
                fetched.set()
            case Gather(vw=1), Gathered() if rooms.starts == 1:
                assert went_on.wait(PATIENCE)
                rooms.restart()
                raise Unreachable("the answer is lost")

    befall(monkeypatch, before, after)
    with ThreadPoolExecutor(2) as pool, GrpcServer(rooms) as server:
        found = [pool.submit(gathers, index, server.address) for index in range(2)]
        assert [each.result(PATIENCE) for each in found] == [[0, 1], [0, 1]]
    assert rooms.starts == 2
    rooms.close()


def for_ever(group: Group) -> None:
    while True:
        group.gather(group.index, "a test")


@pytest.mark.parametrize("lost", [0, 2])
def test_each_node_says_once_who_is_lost_and_nobody_waits_for_it(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was not started by our launcher learnt nothing, and waited an hour for it to enter the next fit."""
    told: dict[int, list[tuple[int, str, str, str]]] = {index: [] for index in range(3)}
    places = ["node 0, one", "node 0, one", "node 1, other"]
    asked, status = Event(), Sessions.status

    def noted(rooms: Sessions) -> dict[str, Any]:
        if told[0]:
            asked.set()
        return status(rooms)

    monkeypatch.setattr(Sessions, "status", noted)
    rooms, settings = Sessions(LEASE), WSPCallback(lease=LEASE).settings
    with ThreadPoolExecutor(3) as pool, GrpcServer(rooms) as server:
        groups = [
            Group(
                launch_of(index, 3, settings, PATIENCE),
                FoundServers(server.address, (server.address,) if index == 0 else (), Security()),
                on_loss=lambda *loss, index=index: told[index].append(loss),
            )
            for index in range(3)
        ]
        groups[0]._stays_after_loss = True  # as torchrun has started it
        for one in groups:
            one._departures.places = {one.index: places[one.index]}
        for opened in [pool.submit(one.open) for one in groups]:
            opened.result(PATIENCE)
        one = groups.pop(lost)
        assert one._launch is not None
        one._launch.close()  # without a word
        one._exits.pop_all()
        atexit.unregister(one.part)
        silent = f"silent for longer than its lease of {LEASE:g} s (raise WSPCallback(lease=...) if it may be)"
        if lost == 0:
            for ended in [pool.submit(for_ever, each) for each in groups]:
                with pytest.raises(PeerFailed, match=r"virtual worker 0 \(node 0, one\) is lost: it was silent"):
                    ended.result(PATIENCE)
        else:
            found = [pool.submit(each.gather, each.index, "a test") for each in groups]
            assert [each.result(PATIENCE) for each in found] == [[0, 1], [0, 1]]
            for each in groups:
                with pytest.raises(PeerFailed) as error:
                    each.enter_fit([("a", torch.ones(3))], ())
                assert str(error.value) == f"VW {each.index} cannot go on without VW 2, which was {silent}"
        first = pool.submit(groups[0].part)
        if lost:
            assert asked.wait(PATIENCE), "it has left, and looks whether the other one has"
            assert not first.done()
        groups[1].part()
        first.result(PATIENCE)
    assert asked.is_set() == bool(lost)
    who = f"virtual worker {lost} ({places[lost]})"
    said = f"{who} is lost: it was {silent}" + ("; the others go on without it" if lost else "")
    loss = (lost, who, f"was {silent}", said)
    assert told == ({0: [], 1: [loss], 2: [loss]} if lost == 0 else {0: [loss], 1: [], 2: []})
    rooms.close()


def test_who_has_left_the_launch_is_not_waited_for_at_the_next_fit() -> None:
    """One whose program ends early: the others waited for it for an hour, and the first process for the others."""
    told: list[Any] = []
    rooms = Sessions(LEASE)
    with ThreadPoolExecutor(2) as pool, GrpcServer(rooms) as server:
        groups = [group_of(index, server.address) for index in range(2)]
        groups[1]._departures._on_loss = lambda *loss: told.append(loss)
        for opened in [pool.submit(one.open) for one in groups]:
            opened.result(PATIENCE)
        groups[0].part()
        with pytest.raises(PeerFailed, match="VW 1 cannot go on without VW 0, which has ended"):
            pool.submit(groups[1].enter_fit, [("a", torch.ones(3))], ()).result(PATIENCE)
        groups[1].part()
    assert told == [], "that is no loss"
    rooms.close()


def test_the_first_one_left_on_each_node_says_which_updates_are_lost(capsys: pytest.CaptureFixture[str]) -> None:
    places = dict(enumerate(["node 0, one", "node 0, one", "node 1, other", "node 1, other"]))
    said = []
    for index in (0, 1, 3):
        one = Departures(index, "", lambda *_: None)
        one.places = places
        for last in (1, 3, -1):
            one.tell_of_updates(Lost(2, 0, 1, last))
        said.append(capsys.readouterr().err.splitlines())
    who = "virtual worker 2 (node 1, other)"
    lost = [
        f"hetpipe: the updates of {who} from wave 1 are lost: only it and the lost server had them.",
        f"hetpipe: the updates of {who} from waves 1 to 3 are lost: only it and the lost server had them.",
        f"hetpipe: what {who} had pushed from wave 1 on, if anything, is lost: only the lost server knew of it.",
    ]
    assert said == [lost, [], lost]


def refused(address: str, shown: Security) -> str:
    one = group_of(0, address, shown)
    with pytest.raises(SettingError) as error:
        one.open()
    close(one, "refused")
    return str(error.value)


def test_who_shows_the_wrong_things_is_told_in_one_sentence(tmp_path: Path) -> None:
    ours = security("tls")
    assert ours is not None
    certificates.cache_clear()
    theirs = str(certificates() / "ca.pem")
    rooms = Sessions(LEASE)
    with GrpcServer(rooms, security=ours) as server:
        begin = f"this virtual worker was refused: the server at {server.address}"
        for token in (None, "wrong"):
            what = "refused the call: the token is missing or wrong; give the server's as HETPIPE_TOKEN"
            assert refused(server.address, replace(ours, token=token)) == f"{begin} {what}"
        what = "shows no certificate that security.ca has signed; give the one that signed it"
        assert refused(server.address, replace(ours, ca=theirs)) == f"{begin} {what}"
        silent = group_of(0, server.address, Security(token=ours.token), timeout=0.5)
        with pytest.raises(ServersSilent, match=r"for an answer: .* other certificates than security has\?"):
            silent.open()
        close(silent, "refused")
    rooms.close()
    one = group_of(0, "node-1:5000", Security(token="a"))
    with pytest.raises(SettingError, match="node-1:5000 is open to other machines and security has no certificates"):
        one.open()
    close(one, "refused")


def test_servers_that_will_not_come_back_end_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ``timeout`` when the one who started the server has given it up."""
    known = iter([None, None])
    given_up = ServerLost("the parameter server has failed 6 times")
    one = group_of(0, "127.0.0.1:1", timeout=600.0)
    monkeypatch.setattr(servers, "lost", lambda: next(known, given_up))
    with pytest.raises(ServerLost, match="has failed 6 times"):
        one.open()
    close(one, "ended")


def test_a_gather_waits_within_what_it_is_told() -> None:
    """In a fit that lets user code run meanwhile (law L8)."""
    waited: list[str] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        waited.append("began")
        yield
        waited.append("ended")

    rooms = Sessions(LEASE)
    with ThreadPoolExecutor(2) as pool, GrpcServer(rooms) as server:
        groups = [group_of(index, server.address) for index in range(2)]
        for opened in [pool.submit(one.open) for one in groups]:
            opened.result(PATIENCE)
        groups[0].waiting = waiting
        found = [pool.submit(one.gather, one.index, "a test") for one in groups]
        assert [each.result(PATIENCE) for each in found] == [[0, 1], [0, 1]]
        groups[0].waiting = nullcontext
        for closed in [pool.submit(close, one) for one in groups]:
            closed.result(PATIENCE)
    assert waited == ["began", "ended"]
    rooms.close()


def test_a_gather_may_be_larger_than_what_a_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation outputs of more than 64 MiB were refused, without a way out."""
    limit = 64 << 10
    monkeypatch.setattr(group, "gather_in_chunks", partial(gather_in_chunks, chunk=limit // 4))
    monkeypatch.setattr(Gathers, "limit", limit)
    value = torch.arange(limit, dtype=torch.float64)
    rooms = Sessions(LEASE)
    with ThreadPoolExecutor(2) as pool, GrpcServer(rooms) as server:
        groups = [group_of(index, server.address) for index in range(2)]
        for opened in [pool.submit(one.open) for one in groups]:
            opened.result(PATIENCE)
        found = [pool.submit(one.gather, value if one.index else "short", "a test") for one in groups]
        for each in found:
            short, large = each.result(PATIENCE)
            assert short == "short"
            assert torch.equal(large, value)
        for closed in [pool.submit(close, one) for one in groups]:
            closed.result(PATIENCE)
    rooms.close()
