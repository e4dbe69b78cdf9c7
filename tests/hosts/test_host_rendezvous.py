"""The meeting of nodes, some of which serve: who is let in, what each learns, and how it ends."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts.host_rendezvous import Arrival, HostRendezvous, Meeting
from lightning_hetpipe.hosts.secured_socket import admit, check_names, listen
from lightning_hetpipe.server.transport.security import Security
from tests.server.transports import certificates, eventually

TOKEN = Security(token="one")
ATTIC = Arrival(1, "plan", "10.0.0.2:7", "10.0.0.2:8", stays=True)
CELLAR = Arrival(2, "plan", "10.0.0.3:7")
EXPECTED = {1: "attic", 2: "cellar"}
LONG, SHORT = 30.0, 0.3


OWN = Arrival(0, "plan")


def rendezvous(security: Security = TOKEN, own: Arrival = OWN) -> HostRendezvous:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return HostRendezvous(address, security, own, EXPECTED)


def test_everybody_learns_where_all_serve_and_how_node_0_ends() -> None:
    with rendezvous() as node0, ThreadPoolExecutor(3) as pool:
        attic = pool.submit(_serves, node0.address, ATTIC)
        cellar = pool.submit(_asks, node0.address, CELLAR)
        child = pool.submit(_asks, node0.address, OWN)
        assert child.result(LONG) == [ATTIC, CELLAR]
        assert node0.everyone(LONG) == [ATTIC, CELLAR]
        node0.end(143)  # maybe before all have heard that all are there
        assert cellar.result(LONG) == [ATTIC, CELLAR]
        assert attic.result(LONG) == 143


def _serves(address: str, own: Arrival) -> int | None:
    with Meeting(address, TOKEN, own, LONG) as meeting:
        assert meeting.everyone(LONG) == [ATTIC, CELLAR]
        return meeting.status()


def _asks(address: str, own: Arrival) -> list[Arrival]:
    with Meeting(address, TOKEN, own, LONG) as meeting:
        return meeting.everyone(LONG)


def test_a_node_that_is_being_let_in_hears_that_node_0_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection was closed like one that shows nothing, and it named a refusal."""
    note = HostRendezvous._note

    def noted(self: HostRendezvous, arrival: Arrival, raw: socket.socket) -> str | None:
        found = note(self, arrival, raw)
        ends.append(pool.submit(self.end, 143))
        eventually(lambda: self._door._closed and not any(self._door._there.values()), "node 0 does not end")
        return found

    ends = list[Future[None]]()
    monkeypatch.setattr(HostRendezvous, "_note", noted)
    with ThreadPoolExecutor(1) as pool, rendezvous() as node0:
        with pytest.raises(SettingError, match="has ended before all nodes of the plan had come"):
            _serves(node0.address, ATTIC)
        ends[0].result(LONG)


def test_a_node_that_hears_late_hears_that_all_had_come() -> None:
    with rendezvous() as node0, Meeting(node0.address, TOKEN, ATTIC, LONG) as attic:
        eventually(lambda: node0._missing().keys() == {CELLAR.node}, "attic has not come")
        with node0._changed:
            node0._arrived[CELLAR.node] = CELLAR  # without a word, so that attic's thread hears of it at the end
        node0.end(143)
        assert attic.everyone(LONG) == [ATTIC, CELLAR]
        assert attic.status() == 143


def test_node_0_serves_as_well() -> None:
    own = Arrival(0, "plan", "10.0.0.1:7")
    with rendezvous(own=own) as node0, ThreadPoolExecutor(2) as pool:
        others = [pool.submit(_asks, node0.address, each) for each in (replace(ATTIC, stays=False), CELLAR)]
        assert node0.everyone(LONG)[0] == own
        assert [each.result(LONG)[0] for each in others] == [own, own]


def test_who_is_missing_is_named() -> None:
    with rendezvous() as node0, Meeting(node0.address, TOKEN, CELLAR, LONG) as cellar:
        with pytest.raises(SettingError, match=r"^attic \(NODE_RANK=1\) of the plan did not come within 0.3 s"):
            eventually(lambda: "attic" in str(node0.everyone(SHORT)), "cellar has not come")
        with pytest.raises(SettingError, match=r"has waited for other nodes of the plan for 0.3 s"):
            cellar.everyone(SHORT)


def test_node_0_ends_before_all_have_come() -> None:
    with rendezvous() as node0, Meeting(node0.address, TOKEN, CELLAR, LONG) as cellar:
        node0.end(1)
        with pytest.raises(SettingError, match="has ended before all nodes of the plan had come"):
            cellar.everyone(LONG)


def test_nobody_answers() -> None:
    with rendezvous() as node0:
        address = node0.address
    with pytest.raises(SettingError, match=rf"node 0 does not answer at {address} within 0.3 s .* NODE_RANK=0"):
        Meeting(address, TOKEN, CELLAR, SHORT)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (replace(CELLAR, plan="other"), r"its plan is another one \(checksum other, and plan here\)"),
        (replace(CELLAR, node=3), "NODE_RANK=3 serves no stage of the plan"),
    ],
)
def test_a_node_that_does_not_fit_is_refused(own: Arrival, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with rendezvous() as node0:
        with pytest.raises(SettingError, match=f"does not let this process in: {message}"):
            Meeting(node0.address, TOKEN, own, LONG)
        eventually(lambda: "a node at 127.0.0.1 was refused" in capfd.readouterr().err, "node 0 has not said it")
        with pytest.raises(SettingError, match=rf"within 0.3 s \(127.0.0.1 was refused: {message}"):
            node0.everyone(SHORT)


def test_a_rank_that_has_come_is_refused_while_its_node_is_there() -> None:
    with rendezvous() as node0:
        first = Meeting(node0.address, TOKEN, ATTIC, LONG)
        with Meeting(node0.address, TOKEN, replace(CELLAR, stays=True), LONG) as cellar:
            assert cellar.everyone(LONG) == [ATTIC, replace(CELLAR, stays=True)]
        second = replace(ATTIC, host="10.0.0.9:7")
        with pytest.raises(SettingError, match="NODE_RANK=1 has come already"):
            Meeting(node0.address, TOKEN, second, LONG)
        first.__exit__()
        with Meeting(node0.address, TOKEN, second, LONG) as again:
            assert second in again.everyone(LONG)


def test_another_token_is_not_let_in() -> None:
    with (
        rendezvous() as node0,
        pytest.raises(SettingError, match="does not let this process in: HETPIPE_TOKEN is another"),
    ):
        Meeting(node0.address, Security(token="other"), CELLAR, LONG)


def test_certificates_on_both_sides() -> None:
    folder = certificates()
    ca, certificate, key = (str(folder / f"{name}.pem") for name in ("ca", "certificate", "key"))
    security = Security(token="one", ca=ca, certificate=certificate, key=key)
    with (
        rendezvous(security) as node0,
        Meeting(node0.address, security, CELLAR, LONG) as cellar,
        Meeting(node0.address, security, ATTIC, LONG) as attic,
    ):
        assert attic.everyone(LONG) == cellar.everyone(LONG) == node0.everyone(LONG) == [ATTIC, CELLAR]


def test_a_certificate_that_does_not_name_its_node() -> None:
    folder = certificates()
    ca, certificate, key = (str(folder / f"{name}.pem") for name in ("ca", "certificate", "key"))
    security = Security(token="one", ca=ca, certificate=certificate, key=key)
    check_names(security, "127.0.0.1")
    check_names(TOKEN, "10.0.0.9")
    with pytest.raises(SettingError, match=r"certificate.pem does not fit 10.0.0.9, .*by the commands of docs"):
        check_names(security, "10.0.0.9")


def test_a_port_that_is_taken() -> None:
    with rendezvous() as node0, pytest.raises(SettingError, match=r"node 0 cannot listen on .*MASTER_PORT \+ 1"):
        HostRendezvous(node0.address, TOKEN, ATTIC, EXPECTED).__enter__()


def test_whoever_shows_itself_byte_by_byte_is_not_waited_for() -> None:
    """The bytes of a stranger come in time each, but all together do not."""
    ours, its = connected()
    stops = threading.Event()

    def drips() -> None:
        with suppress(OSError):
            its.sendall((1000).to_bytes(4, "big"))
            while not stops.wait(0.05):
                its.sendall(b" ")

    thread = threading.Thread(target=drips)
    thread.start()
    with ours, its:
        with pytest.raises(TimeoutError, match=r"it has not shown who it is within 0\.5 s"):
            admit(ours, Security(), 0.5)
        stops.set()
        thread.join()


def connected() -> tuple[socket.socket, socket.socket]:
    with listen("127.0.0.1", 0) as listener:
        its = socket.create_connection(listener.getsockname())
        return listener.accept()[0], its
