"""Which servers a process starts, where it looks for the coordinator, and what is refused before anything listens."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_hetpipe import WSPCallback
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch import local_rendezvous, parent_watch, servers, supervision
from lightning_hetpipe.launch.ranks import Rank, Role
from lightning_hetpipe.server.protocol.identifiers import FirstLost, PeerFailed
from lightning_hetpipe.server.transport.security import Security

INSECURE = {"insecure": True}
VARIABLES = (
    "HETPIPE_LAUNCH",
    "MASTER_ADDR",
    "MASTER_PORT",
    "HETPIPE_PORT",
    "HETPIPE_TOKEN",
    "HETPIPE_COORDINATOR",
    "HETPIPE_CA",
)


class Started:
    """Stands for a server's process: remembers how it was started."""

    code = None
    """It never ends by itself."""

    def __init__(self, handler: str, arguments: dict[str, Any], address: str, security: Security) -> None:
        self.address = address.replace(":0", ":7")
        self.security = security if security.token else replace(security, token="invented")
        self.lease = arguments["lease"]
        self.stopped = False

    def start(self) -> None:
        if "1.1.1.1" in self.address:
            raise SettingError("address=1.1.1.1 cannot be had")

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No environment but what the test sets, and no real server."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(servers, "ServerProcess", Started)
    yield
    servers.stop()


def rank(index: int, nodes: int = 2, per_node: int = 1, role: Role = Role.FIRST) -> Rank:
    return Rank(
        index,
        nodes * per_node,
        index // per_node,
        index % per_node,
        per_node,
        nodes,
        role,
        (per_node,) * nodes if nodes > 1 else (),
    )


def launch(at: Rank, environment: ClusterEnvironment | None = None, **wsp: Any) -> servers.LaunchSettings:
    return servers.LaunchSettings(at, environment or LightningEnvironment(), WSPCallback(**wsp).settings, 0.3)


def found(at: Rank, environment: ClusterEnvironment | None = None, **wsp: Any) -> servers.FoundServers:
    return servers.find(launch(at, environment, **wsp))


def put(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_on_one_machine_the_first_starts_one_and_tells_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    first = rank(0, 1, 2)
    told = servers.start(launch(first, lease=7))
    assert told == {"HETPIPE_COORDINATOR": "127.0.0.1:7", "HETPIPE_TOKEN": "invented"}
    here = found(first, lease=7)
    assert here == servers.FoundServers("127.0.0.1:7", ("127.0.0.1:7",), Security(token="invented"))
    put(monkeypatch, HETPIPE_CA="certificates do not matter on loopback")
    monkeypatch.setattr(parent_watch, "launcher_variables", lambda: told)
    assert found(rank(1, 1, 2, Role.CHILD)) == replace(here, known=())


def test_the_servers_that_a_user_names_are_all(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, HETPIPE_TOKEN="open-sesame")
    named = ["one:1", "two:2"]
    first = servers.FoundServers("one:1", ("one:1", "two:2"), Security(token="open-sesame"), of_nodes=(1, 1))
    assert found(rank(0), servers=named) == first
    assert found(rank(1), servers=named) == replace(first, known=())
    assert servers.start(launch(rank(0), servers=named)) == {}


def test_all_processes_of_a_launch_know_it_by_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that a user started may serve another launch."""
    told = servers.start(launch(rank(0, 1, 2), servers=["one:1"]))
    here = found(rank(0, 1, 2), servers=["one:1"]).launch
    assert len(here) == 16
    monkeypatch.setattr(parent_watch, "launcher_variables", lambda: told)
    assert found(rank(1, 1, 2, Role.CHILD), servers=["one:1"]).launch == here
    assert found(rank(2, 2, 2), servers=["one:1"]).launch == ""
    put(monkeypatch, MASTER_ADDR="node0", MASTER_PORT="5000")
    assert {found(rank(index, 2, 2), servers=["one:1"]).launch for index in (0, 2)} == {"node0:5000/"}


def test_each_node_has_one_and_all_look_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT="5000", HETPIPE_TOKEN="open-sesame")
    secret = Security(token="open-sesame")
    first = found(rank(0, 2, 2))
    assert first == servers.FoundServers("127.0.0.1:5001", ("127.0.0.1:5001",), secret, hosts=True, of_nodes=(2, 2))
    servers.stop()
    assert found(rank(1, 2, 2, Role.CHILD)) == servers.FoundServers("127.0.0.1:5001", (), secret, of_nodes=(2, 2))
    assert found(rank(2, 2, 2)) == servers.FoundServers(
        "127.0.0.1:5001", ("127.0.0.1:7",), secret, hosts=True, of_nodes=(2, 2)
    )
    servers.stop()
    assert found(rank(2, 2, 2), placement="local") == servers.FoundServers(
        "127.0.0.1:5001", (), secret, of_nodes=(2, 2)
    )
    put(monkeypatch, HETPIPE_PORT="6000")
    assert found(rank(0)).known == ("127.0.0.1:6000",)
    servers.stop()
    assert found(rank(1)).known == ("127.0.0.1:6000",)


def test_addresses_of_the_new_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, MASTER_ADDR="::1", MASTER_PORT="5000", HETPIPE_TOKEN="open-sesame")
    assert found(rank(0)).coordinator == "[::1]:5001"
    servers.stop()
    assert found(rank(1)).known == ("[::1]:7",)


@pytest.mark.parametrize(
    ("variables", "security", "says"),
    [
        ({}, {}, "num_nodes=2 needs MASTER_ADDR and MASTER_PORT; set"),
        ({"MASTER_ADDR": "10.0.0.1"}, {}, "num_nodes=2 needs MASTER_PORT; set"),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"}, INSECURE, "num_nodes=2 needs a secret that all nodes"),
        (
            {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000", "HETPIPE_TOKEN": "open-sesame"},
            {},
            "num_nodes=2 has a server on 10.0.0.1:5001, open to other machines, without certificates; set HETPIPE_CA",
        ),
        (
            {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000", "HETPIPE_TOKEN": "a", "HETPIPE_PORT": "66000"},
            INSECURE,
            "HETPIPE_PORT=66000 must be a port",
        ),
        (
            {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "5000", "HETPIPE_TOKEN": "a"},
            INSECURE,
            "MASTER_ADDR=no-such-host.invalid is not known on this node",
        ),
        (
            {"MASTER_ADDR": "1.1.1.1", "MASTER_PORT": "5000", "HETPIPE_TOKEN": "a"},
            INSECURE,
            "this node's server cannot listen on 1.1.1.1:5001: node 0's listens on MASTER_ADDR, which must be that",
        ),
    ],
)
def test_refusals(
    variables: dict[str, str], security: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, **variables)
    with pytest.raises(SettingError) as refused:
        found(rank(0), security=security)
    assert str(refused.value).startswith(says)


def test_a_name_that_means_loopback_on_the_first_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's /etc/hosts has it for a machine's own name: others could never reach what listens there."""
    put(monkeypatch, MASTER_ADDR="node-1", MASTER_PORT="5000", HETPIPE_TOKEN="open-sesame")
    monkeypatch.setattr(servers, "_resolved", lambda host, port: (None, ("127.0.1.1", port)))
    with pytest.raises(
        SettingError, match=r"MASTER_ADDR=node-1 means 127\.0\.1\.1 on node 0, which other nodes cannot"
    ):
        found(rank(0), security=INSECURE)


def torchrun(monkeypatch: pytest.MonkeyPatch, run: str) -> ClusterEnvironment:
    put(monkeypatch, MASTER_ADDR="localhost", MASTER_PORT="5000", TORCHELASTIC_RUN_ID=f"{run}-{os.getpid()}")
    return TorchElasticEnvironment()


def test_processes_that_torchrun_started_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = torchrun(monkeypatch, "ours")
    first = found(rank(0, 1, 2, Role.EXTERNAL), environment)
    assert first == servers.FoundServers("127.0.0.1:7", ("127.0.0.1:7",), Security(token="invented"), hosts=True)
    assert found(rank(0, 1, 2, Role.EXTERNAL), environment) == first, "the next Trainer's run"
    second = rank(1, 1, 2, Role.EXTERNAL)
    assert found(second, environment) == replace(first, known=(), hosts=False)
    with pytest.raises(SettingError, match="another launch on this machine has the same MASTER_ADDR and MASTER_PORT"):
        local_rendezvous.LocalRendezvous(f"localhost/5000/ours-{os.getpid()}//", {})
    others = torchrun(monkeypatch, "theirs")
    with pytest.raises(SettingError, match=r"has waited 0\.3 s for the first one on this machine \(LOCAL_RANK=0"):
        found(second, others)


def test_one_that_was_lost_is_started_by_hand_beside_a_named_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """MASTER_ADDR and MASTER_PORT name the launch, whose first process has started the others."""
    environment = torchrun(monkeypatch, "by-hand")
    with monkeypatch.context() as patch:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name)
        found(rank(0, 1, 2, Role.FIRST), environment)
        assert servers._rendezvous is None
    first = found(rank(0, 1, 2, Role.FIRST), environment)
    assert found(rank(1, 1, 2, Role.EXTERNAL), environment).coordinator == first.coordinator


def test_other_users_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"ours-{os.getpid()}"
    rendezvous = local_rendezvous.LocalRendezvous(name, {"secret": "open-sesame"})
    try:
        met = local_rendezvous.ask(name, 1.0)
        assert met.variables == {"secret": "open-sesame"}
        met.connection.close()
        monkeypatch.setattr(local_rendezvous, "_user", lambda connection: os.getuid() + 1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.connect(local_rendezvous._name(name))
            assert asking.recv(100) == b""
    finally:
        rendezvous.close()


def test_who_has_met_the_first_process_learns_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual worker 1, which a person has started, waited for its server until a timeout; nor was it asked to tell the
    supervisor of what it saves, or told what the first one goes on from."""
    environment = torchrun(monkeypatch, "watched")
    ours, theirs = os.pipe()
    monkeypatch.setenv(supervision.VARIABLE, f"{theirs}@/run/last.ckpt")
    try:
        found(rank(0, 1, 2, Role.FIRST), environment)
        found(rank(1, 1, 2, Role.EXTERNAL), environment)
        assert servers.resumed_from() == Path("/run/last.ckpt")
        supervision.note_lost()
        assert os.read(ours, 100) == b"\n"
        assert servers.lost() is None
        assert servers._rendezvous is not None
        servers._rendezvous.close()
        assert isinstance(servers.lost(), FirstLost)
    finally:
        monkeypatch.setattr(supervision, "_pipe", None)
        for descriptor in (ours, theirs):
            os.close(descriptor)


def test_other_users_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"ours-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind(local_rendezvous._name(name))
        squatter.listen()
        monkeypatch.setattr(local_rendezvous, "_user", lambda connection: os.getuid() + 1)
        with pytest.raises(SettingError, match="has waited"):
            local_rendezvous.ask(name, 0.1)


def test_a_token_of_the_users_lets_him_ask_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was always made up, so that `hetpipe-server status` could ask no server of a launch's."""
    put(monkeypatch, HETPIPE_TOKEN="known")
    told = servers.start(launch(rank(0, nodes=1, per_node=2)))
    assert told["HETPIPE_TOKEN"] == "known"


def test_who_has_lost_its_launcher_need_not_wait_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with the launcher; they waited for it until they were killed."""
    ours, childs = parent_watch.pair()
    with ours, childs:
        child = parent_watch.LaunchedChild(1, 2, childs)
        monkeypatch.setattr(parent_watch, "this_child", lambda: child)
        assert servers.lost() is None
        child.orphaned = True
        assert isinstance(servers.lost(), PeerFailed)


def test_a_launch_with_room_is_found_by_those_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """By address and port, as processes of torchrun find it; the first process is told to have them."""
    first = Rank(0, 3, 0, 0, 3, 1, Role.FIRST, (), 2)
    with pytest.raises(SettingError, match="which it has not started needs MASTER_ADDR and MASTER_PORT"):
        found(first)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(os.getpid()))
    here = found(first)
    assert here.hosts, "it stays for them"
    later = found(Rank(2, 3, 0, 2, 3, 1, Role.EXTERNAL, (), 2))
    assert later.coordinator == here.coordinator
    assert later.security.token == here.security.token
