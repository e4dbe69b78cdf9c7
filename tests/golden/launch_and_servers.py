"""Ranks, nodes, servers and hosts: environment variables of a launch, addresses, certificates, who meets whom."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import (
    KubeflowEnvironment,
    LightningEnvironment,
    TorchElasticEnvironment,
)

from lightning_hetpipe import WSPCallback
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts import host_device, host_rendezvous, host_server, wire
from lightning_hetpipe.hosts.host_rendezvous import Arrival, HostRendezvous, Meeting
from lightning_hetpipe.hosts.host_server import HostServer
from lightning_hetpipe.hosts.remote_stage import RemoteStage
from lightning_hetpipe.hosts.secured_socket import Refused, check_names
from lightning_hetpipe.hosts.stages_apart import StagesApart
from lightning_hetpipe.launch import command, launcher, local_rendezvous, node_hosts, ranks, servers
from lightning_hetpipe.launch.parent_watch import LaunchedChild, pair
from lightning_hetpipe.launch.ranks import Rank, Role, WorkerRange
from lightning_hetpipe.pipeline.plain_code import NotPlain
from lightning_hetpipe.pipeline.stage_messages import Backward
from lightning_hetpipe.server.process import server_process
from lightning_hetpipe.server.process.sessions import Sessions
from lightning_hetpipe.server.transport.grpc_server import GrpcServer
from lightning_hetpipe.server.transport.security import Security, split
from tests.golden.cases import Case, Place, case
from tests.server.transports import Desk, certificates

CPU = LightningEnvironment()


def rank_of(
    place: Place, workers: int | WorkerRange, nodes: int, environment: ClusterEnvironment, planned: Any
) -> Rank:
    place.patch.setattr(ranks, "this_child", lambda: None)
    return ranks.find_rank(workers, nodes, environment, planned)


def rank(
    setting: str,
    value: object,
    *way_out: str,
    workers: int | WorkerRange = 1,
    nodes: int = 1,
    planned: tuple[int, ...] = (),
    started: str = "",
    **environment: object,
) -> Case:
    """Case of a process whose launch does not fit its settings; ``started`` says by what."""

    def run(place: Place) -> None:
        place.environment(**environment)
        kinds = {"torchrun": TorchElasticEnvironment, "kubeflow": KubeflowEnvironment}
        rank_of(place, workers, nodes, kinds[started]() if started else CPU, planned)

    name = f"rank {setting} {value} {planned} {started} {environment}"[:90]
    return case(run, setting, value if isinstance(value, str) else repr(value), *way_out, name=name)


def torchrun(*processes: int, node: int = 0, local: int = 0) -> dict[str, Any]:
    """Environment that torchrun sets for one process, if so many processes run on each node."""
    ours: dict[str, Any] = {"RANK": sum(processes[:node]) + local, "LOCAL_RANK": local, "WORLD_SIZE": sum(processes)}
    there = {"GROUP_RANK": node, "LOCAL_WORLD_SIZE": processes[node], "GROUP_WORLD_SIZE": len(processes)}
    return {**ours, **there, "started": "torchrun"}


def children_of_another_number(place: Place) -> None:
    ours, childs = pair()
    with ours, childs:
        place.environment(NODE_RANK=1, LOCAL_RANK=2)
        place.patch.setattr(ranks, "this_child", lambda: LaunchedChild(2, 3, childs))
        ranks.find_rank(1, 2, CPU)


def windows(place: Place) -> None:
    place.patch.setattr(sys, "platform", "darwin")
    local_rendezvous.ask("launch", 0.0)


def after_a_failure(place: Place) -> None:
    place.patch.setattr(launcher, "_launch_of_job", lambda: SimpleNamespace(failed=True, processes=2))
    alone: Any = SimpleNamespace(rank=Rank(0, 2, 0, 0, 2, 1, Role.FIRST))
    launcher.Launcher._launched(alone, 0)


RANKS = [
    rank("NODE_RANK", "1", "num_nodes=1", "0 to num_nodes - 1", NODE_RANK=1),
    rank("NODE_RANK", "one", "whole number", "0 on the first node", nodes=2, NODE_RANK="one"),
    rank("LOCAL_RANK", "4", "virtual_workers=[2, 4]", "LOCAL_RANK=0 to 3", "unset it", workers=WorkerRange(2, 4),
            LOCAL_RANK=4),
    rank("LOCAL_RANK", "1", "virtual_workers=1", "LOCAL_RANK=0 to 0", "plan", nodes=2, LOCAL_RANK=1, NODE_RANK=1),
    rank("virtual_workers", "[2, 4]", "3 nodes", "multiple of 3", workers=WorkerRange(2, 4), nodes=3),
    rank("virtual_workers", "[1, 4]", "5 processes", "process 4 of node 0", "raise the maximum",
         workers=WorkerRange(1, 4), **torchrun(5, local=4)),
    rank("virtual_workers", "3", "2 processes", "start 3", "leave virtual_workers out", workers=3, **torchrun(2, 2)),
    rank("num_nodes", "3", "on 2", "leave num_nodes out", workers=2, nodes=3, **torchrun(2, 2)),
    rank("num_nodes", "2", "3 processes", "number of nodes", nodes=2, started="kubeflow", RANK=2, WORLD_SIZE=3),
    rank("num_nodes", "3", "2 nodes", "num_nodes=2", "plan for 3 nodes", nodes=3, planned=(1, 1)),
    rank("num_nodes", "1", "2 nodes", "Trainer(num_nodes=2)", "NODE_RANK=0", "give the cluster", planned=(1, 1)),
    rank("the plan", "2, 1 and 4", "6 processes", "one process for each virtual worker", planned=(2, 1, 4),
         **torchrun(2, 1, 3)),
    case(children_of_another_number, "virtual_workers", "1", "virtual_workers=3", "another strategy", "another program",
         name="rank of a child"),
    case(lambda _: ranks.devices_of([torch.device("cuda", 0)], 0, 2), "virtual_workers", "2", "cuda:0",
         "fewer virtual_workers", "see all devices", name="devices of virtual workers"),
    case(lambda _: command._parts([], sys), "virtual_workers", "", "standard input", "save it as a file",
         name="a program from standard input"),
    case(after_a_failure, "virtual_workers", "2", "start the program anew", name="a launch after a failure"),
    case(windows, "hetpipe-server", "Linux", "WSPCallback(servers=[its address])", "HETPIPE_TOKEN",
            name="not on Linux"),
]  # fmt: skip

TOKEN = Security(token="open-sesame")
INSECURE = replace(TOKEN, insecure=True)
TWO = Rank(0, 2, 0, 0, 1, 2, Role.FIRST, (1, 1))
HERE: dict[str, Any] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5000"}
OTHERS: dict[str, Any] = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"}


def over_nodes(
    setting: str, value: str, *way_out: str, security: Security = TOKEN, changes: Any = None, **environment: object
) -> Case:
    def run(place: Place) -> None:
        place.environment(**environment)
        for name, known in (changes or {}).items():
            place.patch.setattr(servers, name, known)
        servers.over_nodes(servers.LaunchSettings(TWO, CPU, WSPCallback(security=security).settings, 1.0))

    return case(run, setting, value, *way_out, name=f"over nodes {setting} {value} {way_out[0]}"[:80])


def without_accelerators(place: Place) -> None:
    place.patch.setattr(host_device, "all_devices", list)
    host_device._accelerator(1, "T4", "attic")


def unreachable(_: Place) -> None:
    servers.host_of_node(Rank(1, 2, 1, 0, 1, 2, Role.FIRST), "255.255.255.255:5000")


def refused_server(place: Place) -> None:
    class Taken:
        def __init__(self, *_: object) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def __enter__(self) -> None:
            raise SettingError("address=1.1.1.1:5001 cannot be had")

    place.patch.setattr(servers, "Supervisor", Taken)
    servers._serve("1.1.1.1:5001", INSECURE, 1.0)


def taken_launch(_: Place) -> None:
    name = f"golden-{os.getpid()}/5000/"
    first = local_rendezvous.LocalRendezvous(name, {})
    try:
        local_rendezvous.LocalRendezvous(name, {})
    finally:
        first.close()


@contextmanager
def taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def at_a_taken_port(make: Callable[[str], Any]) -> Callable[[Place], None]:
    def run(_: Place) -> None:
        with taken_port() as address, make(address):
            pass

    return run


def host_of_a_node(place: Place) -> None:
    place.environment(HETPIPE_PORT=5001)
    nodes = servers.ServingNodes(("a", "b"), {"b": "stage 0"}, "x")

    def taken(address: str, security: Security) -> None:
        raise SettingError(f"address={address} cannot be had")

    place.patch.setattr(host_server, "HostServer", taken)
    place.patch.setattr(servers, "host_of_node", lambda *_: "127.0.0.1")
    node_hosts._host(Rank(1, 1, 1, 0, 0, 2, Role.HOST, (1, 0)), "10.0.0.1:5001", TOKEN, nodes)


def secured(*names: str) -> Security:
    ca, certificate, key = (str(certificates() / name) for name in names)
    return Security(ca, certificate, key)


def files(setting: str, make: Callable[[Place], Security], value: str, *way_out: str) -> Case:
    return case(lambda place: make(place).read(), setting, value, *way_out, name=f"{setting} {value}")


def no_pem(place: Place) -> Security:
    (place.folder / "empty.pem").write_text("nothing")
    return Security("empty.pem", "b", "c")


def unnamed_certificate(_: Place) -> None:
    check_names(replace(secured("ca.pem", "certificate.pem", "key.pem"), token="one"), "10.0.0.9")


SETTINGS = WSPCallback().settings
NOWHERE = "127.0.0.1:1"


def no_address(text: str) -> Case:
    way_out = "host:port", "127.0.0.1:5000", "[::1]:5000"
    return case(lambda _: split(text), "address", text, *way_out, name=f"address={text}")


def open_address(text: str) -> Case:
    way_out = "ca, certificate and key", "insecure=True"
    return case(lambda _: TOKEN.check(text), "address", text, *way_out, name=f"open address={text}")


def no_token(text: str) -> Case:
    way_out = "1 to 4096", "ASCII", "make another"
    check = Security(token=text).check
    return case(lambda _: check(NOWHERE), "security.token", "", *way_out, name=f"security.token {text[:9]!r}")


SERVERS = [
    over_nodes("MASTER_ADDR", "", "num_nodes=2", "MASTER_PORT", "same values"),
    over_nodes("MASTER_PORT", "", "num_nodes=2", "MASTER_ADDR", "free port", MASTER_ADDR="10.0.0.1"),
    over_nodes("MASTER_PORT", "many", "29500", MASTER_ADDR="10.0.0.1", MASTER_PORT="many"),
    *[over_nodes("HETPIPE_PORT", port, "1 to 65535", "every node", **HERE, HETPIPE_PORT=port) for port in ("66000",
            "x")],
    over_nodes("num_nodes", "2", "HETPIPE_TOKEN", "docs/several-machines.md", security=Security(), **HERE),
    over_nodes("num_nodes", "2", "10.0.0.1:5001", "HETPIPE_CA, HETPIPE_CERTIFICATE and HETPIPE_KEY",
               "WSPCallback(security={'insecure': True})", "strategy.wsp.security.insecure=true", **OTHERS),
    over_nodes("MASTER_ADDR", "node-1", "127.0.1.1", "node 0's address", security=INSECURE,
               changes={"_resolved": lambda *_: (None, ("127.0.1.1", 0))}, MASTER_ADDR="node-1", MASTER_PORT="5000"),
    case(lambda _: servers._resolved("no-such-host.invalid", 1), "MASTER_ADDR", "no-such-host.invalid",
            "node 0's address",
         name="MASTER_ADDR that is not known"),
    case(unreachable, "MASTER_ADDR", "255.255.255.255", "node 0's address", name="MASTER_ADDR out of reach"),
    case(refused_server, "MASTER_ADDR", "1.1.1.1:5001", "HETPIPE_PORT", "MASTER_PORT + 1", "NODE_RANK", "every node",
         name="a server's address that is taken"),
    case(taken_launch, "MASTER_PORT", "5000", "MASTER_ADDR", "--master-port", name="a launch that is taken"),
    case(lambda _: local_rendezvous.ask("golden/1/", 0.0), "virtual worker", "0 s", "LOCAL_RANK=0", "MASTER_ADDR",
         "golden/1", "longer timeout", name="a first process that does not come"),
    case(lambda _: SETTINGS.check_later(replace(SETTINGS, servers=("a:1",))), "servers", "['a:1']", "None", "the same",
         name="servers of a later Trainer"),
    case(lambda _: SETTINGS.check_later(replace(SETTINGS, security=TOKEN)), "security", "", "earlier Trainer",
            "the same",
         name="security of a later Trainer"),
    case(host_of_a_node, "HETPIPE_PORT", "5001", "127.0.0.1", "give another HETPIPE_PORT", name="a host of a node"),
    case(at_a_taken_port(lambda address: GrpcServer(Desk(), address, TOKEN)), "address", "127.0.0.1", "another",
         "port 0", name="a server's port that is taken"),
    case(lambda _: Sessions(1.0, "nowhere/log"), "log", "nowhere/log", "another file", name="a log that cannot be"),
    *map(no_address, ("host", ":1", "host:", "host:65536", "host:x", "::1:5", "a b:1", "unix:/x", "a,b:1")),
    *map(open_address, ("0.0.0.0:0", "[::]:0", "10.1.2.3:5000", "node-1:5000")),
    *map(no_token, ("", "two words", "line\nbreak", "ünïcode", "x" * 5000)),
    case(lambda _: Security("ca.pem").check(NOWHERE), "security.ca", "ca.pem", "security.certificate",
         "ca, certificate and key", "none of them", name="security.ca alone"),
    files("security.ca", lambda _: Security("none.pem", "b", "c"), "none.pem", "path of a file"),
    files("security.ca", no_pem, "empty.pem", "BEGIN"),
    files("security.key", lambda _: secured("ca.pem", "certificate.pem", "ca.key"), "ca.key", "security.certificate",
          "its own key", "without a passphrase"),
]  # fmt: skip

PLAN = Arrival(0, "plan")
ATTIC = Arrival(1, "plan", "10.0.0.2:7")


def meeting(
    setting: str,
    value: str,
    *way_out: str,
    own: Arrival = ATTIC,
    security: Security = TOKEN,
    seconds: float = 30.0,
) -> Case:
    """Case of a node that comes to node 0, and waits for the other nodes for ``seconds``."""

    def run(_: Place) -> None:
        with taken_port() as address:
            pass
        with (
            HostRendezvous(address, TOKEN, PLAN, {1: "attic", 2: "cellar"}),
            Meeting(address, security, own, 5.0) as node,
        ):
            node.everyone(seconds)

    return case(run, setting, value, *way_out, name=f"meeting {setting} {value} {way_out[0]}")


def ended(_: Place) -> None:
    with taken_port() as address:
        pass
    with (
        HostRendezvous(address, TOKEN, PLAN, {1: "attic", 2: "b"}) as node0,
        Meeting(address, TOKEN, ATTIC, 5.0) as node,
    ):
        node0.end(1)
        node.everyone(5.0)


def broken(place: Place) -> None:
    """Node 0 ends while this process hears it."""

    def ends(*_: object) -> None:
        raise OSError

    with taken_port() as address:
        pass
    with HostRendezvous(address, TOKEN, PLAN, {1: "attic", 2: "cellar"}):
        place.patch.setattr(host_rendezvous, "hear", ends)
        with Meeting(address, TOKEN, ATTIC, 5.0) as node:
            node.everyone(30.0)


def refused_process(place: Place) -> None:
    process = server_process.ServerProcess("handler", {}, "127.0.0.1:0", TOKEN)
    place.patch.setattr(subprocess, "Popen", lambda *_, **__: None)
    place.patch.setattr(process, "_ask", lambda *_: {"refused": "address=127.0.0.1:0 cannot be had; give another"})
    place.patch.setattr(process, "stop", lambda: None)
    process.start()


def loss_elsewhere(_: Place) -> None:
    apart: Any = SimpleNamespace(_places={1: "10.0.0.2:7"})
    StagesApart.check(apart, cast(Any, [None, None]))


def not_plain(_: Place) -> None:
    """A minibatch holds what no other machine can be sent."""
    done: list[Any] = []

    def send(_: object) -> None:
        raise NotPlain("a Special is no plain value")

    stage: Any = SimpleNamespace(
        _lock=threading.Lock(),
        _host_memory=SimpleNamespace(flush=lambda: None),
        _asked={},
        _send=send,
        _send_variants=lambda: None,
        _done=lambda *told: done.append(told),
    )
    RemoteStage.put(
        stage, cast(Any, SimpleNamespace(message=Backward(1, 0, 0, [], {}, [], False), event=None, others=()))
    )
    raise done[0][0].error


def missing_nodes(_: Place) -> None:
    with HostRendezvous("127.0.0.1:0", TOKEN, PLAN, {1: "attic"}) as node0:
        node0.everyone(0.0)


def host(error: Exception, setting: str, *way_out: str) -> Case:
    """Case of a host that ends a connection with ``error``."""

    def run(place: Place) -> None:
        def connect(*_: object) -> None:
            raise error

        place.patch.setattr(wire, "connect", connect)
        wire.HostConnection("10.0.0.2:7", INSECURE)

    return case(run, setting, "10.0.0.2:7", *way_out, name=f"a host: {type(error).__name__}")


HOSTS = [
    case(at_a_taken_port(lambda address: HostServer(address, TOKEN)), "address", "127.0.0.1", "another port", "0",
         name="a host's port that is taken"),
    host(Refused("HETPIPE_TOKEN is another"), "stage_hosts", "HETPIPE_TOKEN is another"),
    host(TimeoutError(), "stage_hosts", "60 s", "hetpipe-host", "certificates"),
    host(OSError(111, "Connection refused"), "stage_hosts", "start hetpipe-host", "address=0.0.0.0",
            "correct the address"),
    case(without_accelerators, "attic", "T4:1", "only its CPU", "plan for what is there",
         name="an accelerator that a host has not got"),
    case(at_a_taken_port(lambda address: HostRendezvous(address, TOKEN, PLAN, {})), "node 0", "127.0.0.1",
            "MASTER_ADDR",
         "NODE_RANK", "HETPIPE_PORT", "MASTER_PORT + 1", name="node 0 at a port that is taken"),
    case(missing_nodes, "attic (NODE_RANK=1)", "0 s", "start the program", "NODE_RANK", "WSPCallback(join_timeout=...)",
         name="nodes that do not come to node 0"),
    meeting("node 0", "0.1 s", "start the program", "WSPCallback(join_timeout=...)", seconds=0.1),
    meeting("node 0", "other", "another one", "plan here", own=replace(ATTIC, plan="other")),
    meeting("node 0", "HETPIPE_TOKEN", "another", security=Security(token="other")),
    case(broken, "node 0", "127.0.0.1", "has ended", "look there", name="node 0 ends while it is heard"),
    case(refused_process, "address", "127.0.0.1:0", "give another", name="a server's process that refuses"),
    case(not_plain, "stage_hosts", "Special", "leave stage_hosts out", name="what no host can be sent"),
    case(loss_elsewhere, "stage 1", "the loss", "node of the last stage", name="the last stage on another machine"),
    case(ended, "node 0", "127.0.0.1", "has ended", "look there", name="node 0 has ended"),
    case(lambda _: Meeting(NOWHERE, TOKEN, ATTIC, 0.0), "node 0", NOWHERE, "NODE_RANK=0", "MASTER_ADDR and MASTER_PORT",
         "longer timeout", name="node 0 does not answer"),
    case(unnamed_certificate, "HETPIPE_CERTIFICATE", "certificate.pem", "10.0.0.9", "docs/several-machines.md",
         name="a certificate that does not name its node"),
]  # fmt: skip

CASES = [*RANKS, *SERVERS, *HOSTS]
