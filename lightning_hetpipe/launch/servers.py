"""Servers of a launch: this process starts some of them, and finds the coordinator.

    servers=[...]                   nothing is started, and the first server is the coordinator
    one machine, our launcher       the first VW starts a server on a free loopback port, and informs its children
    one machine, torchrun or such   the first VW starts a server, and other VWs ask the VW (``local_rendezvous``)
    several machines                each node's first process starts a server (with placement="local" only node 0's
                                    does, unless virtual workers have stages on several nodes). Node 0's server is the
                                    coordinator. It listens on MASTER_ADDR, port HETPIPE_PORT or else MASTER_PORT + 1

All VWs meet at the coordinator, where they inform each other of further servers (``workers/group.py``).
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import sys
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch import local_rendezvous, parent_watch, supervision
from lightning_hetpipe.launch.local_rendezvous import FirstProcess, LocalRendezvous
from lightning_hetpipe.launch.ranks import Rank, Role
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.server.process.server_process import ServerProcess, Supervisor
from lightning_hetpipe.server.protocol.identifiers import FirstLost, PeerFailed
from lightning_hetpipe.server.transport.security import Security, is_loopback, joined

COORDINATOR, TOKEN = "HETPIPE_COORDINATOR", "HETPIPE_TOKEN"
"""Variables for a launch's other processes: the coordinator's address, and the token for it."""
LAUNCH = "HETPIPE_LAUNCH"
"""Variable for a launch's other processes: the launch id, if servers are not the launch's own."""
RESUMED = "HETPIPE_RESUMED"
"""Variable for a launch's other processes: the checkpoint from which a restarted first process goes on."""
ANY = "127.0.0.1:0"
"""Address at which a server listens for a single machine."""
PORT = "HETPIPE_PORT"
"""Variable with the port of each node's server, if there are several nodes."""


@dataclass(frozen=True)
class ServingNodes:
    """Nodes of a plan, some of which serve stages of virtual workers that other nodes lead.

    Attributes:
        names: Names of all nodes, by NODE_RANK.
        stages: Descriptions of the served stages, by the names of the serving nodes.
        plan: Checksum of the plan.
    """

    names: tuple[str, ...]
    stages: Mapping[str, str]
    plan: str


@dataclass(frozen=True)
class LaunchSettings:
    """Settings of a launch, as one process has them.

    Attributes:
        timeout: Seconds in which the first process of a machine, and node 0, must answer.
        nodes: Nodes of the plan if some of them serve stages of virtual workers that other nodes lead, else None.
    """

    rank: Rank
    environment: ClusterEnvironment
    wsp: WSPSettings
    timeout: float
    nodes: ServingNodes | None = None

    @property
    def security(self) -> Security:
        return self.wsp.security.from_environment()


@dataclass(frozen=True)
class FoundServers:
    """Servers, as far as one process knows them.

    Attributes:
        known: Addresses of servers that this process sends to all other virtual workers.
        hosts: True if servers end with this process, although VWs that it did not start may still need them.
        launch: Launch id if other launches may use the same servers, else empty.
        of_nodes: Number of virtual workers of each of several nodes, if known, else empty.
    """

    coordinator: str
    known: tuple[str, ...]
    security: Security
    hosts: bool = False
    launch: str = ""
    of_nodes: tuple[int, ...] = ()

    def place_of(self, worker: int) -> str:
        """Return the node of a virtual worker, in brackets, or an empty text if it is not known."""
        return f" (node {bisect(list(accumulate(self.of_nodes)), worker)})" if self.of_nodes else ""


_server: Supervisor | None = None
_rendezvous: LocalRendezvous | None = None
_first: FirstProcess | None = None
"""Process of this machine's first VW, if neither process is the other's launcher."""
_undo = ExitStack()
_OWN_LAUNCH = secrets.token_hex(8)
"""Launch id of our own launcher's processes."""


def start(launch: LaunchSettings) -> dict[str, str]:
    """Start this node's server if this first process has to, unless it runs. Return variables for other processes.
    Raise SettingError if the server cannot listen at its address, or would be open to strangers."""
    rank, wsp = launch.rank, launch.wsp
    if wsp.servers is not None:
        return {} if rank.size > rank.per_node else {LAUNCH: _OWN_LAUNCH}
    if rank.nodes > 1:
        coordinator, security = over_nodes(launch)
        port = coordinator.rpartition(":")[2] if rank.index == 0 else os.environ.get(PORT, "0")
        if rank.local == 0 and (rank.index == 0 or wsp.placement != "local" or launch.nodes is not None):
            _serve(joined(host_of_node(rank, coordinator), int(port)), security, wsp.lease)
        return {COORDINATOR: coordinator, TOKEN: security.token or ""}
    # With the user's token, `hetpipe-server status` can ask. Otherwise the server makes a token that nobody knows.
    server = _serve(ANY, Security(token=launch.security.token), wsp.lease)
    return {COORDINATOR: server.address, TOKEN: server.security.token or ""}


def find(launch: LaunchSettings, further: Sequence[str] = ()) -> FoundServers:
    """Find the servers. The node's first VW starts its node's server, as :func:`start` does. ``further`` are servers of
    nodes without a virtual worker. Raise as :func:`start` does, and SettingError if an environment variable is
    missing."""
    rank, wsp, given = launch.rank, launch.wsp, launch.security
    if wsp.servers is not None:
        known = wsp.servers if rank.index == 0 else ()
        hosts = launch.nodes is not None and rank.index == 0
        return FoundServers(wsp.servers[0], known, given, hosts, _launch_at_servers(launch), rank.of_nodes)
    if rank.local == 0 or rank.nodes > 1:
        variables: Mapping[str, str] = start(launch)
        if rank.nodes == 1:
            _be_met(launch, variables)
    elif rank.role is Role.CHILD:
        variables = parent_watch.launcher_variables()
    else:
        variables = _meet_first(launch).variables
    security = replace(given if rank.nodes > 1 else Security(), token=variables[TOKEN])
    known = (own_address(),) if own_address() and rank.local == 0 else ()
    if rank.index == 0:
        known = (*known, *further)
    hosts = bool(known) and (rank.nodes > 1 or rank.role is Role.EXTERNAL or rank.has_room)
    return FoundServers(variables[COORDINATOR], known, security, hosts, of_nodes=rank.of_nodes)


def own_address() -> str:
    """Return the address of this process's server, or an empty text."""
    return "" if _server is None else _server.server.address


def lost() -> Exception | None:
    """Return the error with which to end if the process that runs the virtual workers' server is gone for good, or
    None."""
    child = parent_watch.this_child()
    if child is not None and child.orphaned:
        return PeerFailed("the launcher has ended")
    if _first is not None and wait([_first.connection], 0):  # it sends nothing more, so it has ended
        return FirstLost()
    return None if _server is None else _server.failure


def resumed_from() -> Path | None:
    """Return the checkpoint from which the first process on this machine goes on after a restart, or None. A process
    that a person has started beside the first process does not know this checkpoint from its own command."""
    found = "" if _first is None else _first.variables.get(RESUMED)
    return Path(found) if found else None


def until_end(close: Callable[[], object]) -> None:
    """Let :func:`stop` call ``close``. This process calls :func:`stop` when it exits at the latest."""
    _undo.callback(close)
    atexit.unregister(stop)
    atexit.register(stop)


def stop() -> None:
    """End the server and the rendezvous of this process, and what others gave to :func:`until_end`."""
    global _server, _rendezvous, _first
    _server = _rendezvous = _first = None
    _undo.close()


def _serve(address: str, security: Security, lease: float) -> ServerProcess:
    """Return the server of this process, which all Trainers of the launch use. Start it if it does not run."""
    global _server
    if _server is None:
        process = ServerProcess(
            "lightning_hetpipe.server.process.sessions:Sessions", {"lease": lease}, address, security
        )
        server = Supervisor(process)
        try:
            server.__enter__()
        except SettingError as error:
            if address == ANY:
                raise
            raise SettingError(
                f"this node's server cannot listen on {address}: node 0's listens on MASTER_ADDR, which must be that"
                f" node's address in the network (other nodes set NODE_RANK), port {PORT} or else MASTER_PORT + 1,"
                " which must be free (the server of an earlier run may still have it); set them so on every node"
                f" ({error})"
            ) from None
        _server = server
        until_end(server.__exit__)
        ask = f"hetpipe-server status address={process.address}"
        known = os.environ.get(TOKEN) == process.security.token
        rank_zero_info(
            f"Parameter server at {process.address} ({ask} shows its clocks"
            f"{'' if known else f', with a {TOKEN} that was set before the start'})"
        )
    return _server.server


def _launch_at_servers(launch: LaunchSettings) -> str:
    """Return the launch id, which is equal in all processes of a launch, for any starter."""
    rank, environment = launch.rank, launch.environment
    if rank.size == rank.started and rank.role is not Role.EXTERNAL:
        return parent_watch.launcher_variables().get(LAUNCH, "") if rank.role is Role.CHILD else _OWN_LAUNCH
    if isinstance(environment, LightningEnvironment) and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return ""  # nobody needs a launch id if all servers are named
    # Without SLURM's step: each node may have its own.
    return f"{environment.main_address}:{environment.main_port}/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"


def _be_met(launch: LaunchSettings, variables: Mapping[str, str]) -> None:
    """Let processes come to this node's first process that this has not started, unless none can."""
    global _rendezvous
    rank = launch.rank
    # A lost process may be started again by hand, if it can know the launch's name.
    is_named = sys.platform == "linux" and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    may_come = rank.role is Role.EXTERNAL or rank.has_room or (rank.per_node > 1 and is_named)
    if _rendezvous is None and may_come:
        told = {**variables, RESUMED: supervision.resumed_from()}
        _rendezvous = LocalRendezvous(_launch_of(launch.environment), told, supervision.supervised())
        _undo.callback(_rendezvous.close)
        if rank.has_room:
            free = " or ".join(f"LOCAL_RANK={local}" for local in range(rank.started, rank.per_node)[:3])
            rank_zero_info(
                f"More virtual workers may come: start this command with {free}, and MASTER_ADDR and MASTER_PORT as"
                f" here ({_launch_of(launch.environment).rstrip('/')})"
            )


def _meet_first(launch: LaunchSettings) -> FirstProcess:
    global _first
    name = _launch_of(launch.environment)
    if _first is None or _first.launch != name:
        _first = local_rendezvous.ask(name, launch.timeout)
        _undo.callback(_first.connection.close)
        if _first.pipe is not None:
            supervision.tell(_first.pipe)
    return _first


# Several nodes.


def host_of_node(rank: Rank, coordinator: str) -> str:
    """Return the host at which this node's servers listen: its address in the network of node 0. Nothing is sent."""
    host, _, port = coordinator.rpartition(":")
    if rank.index == 0:
        return host.strip("[]")
    family, address = _resolved(host.strip("[]"), int(port))
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError as error:
            raise SettingError(
                f"MASTER_ADDR={host} cannot be reached from this node ({error.strerror}); give node 0's address in the"
                " network, on every node"
            ) from None
        own: str = probe.getsockname()[0]
    return own


def over_nodes(launch: LaunchSettings) -> tuple[str, Security]:
    """Return the coordinator's address, and the security of connections. Raise SettingError if it does not suffice for
    several nodes, or if an environment variable is missing."""
    rank, security = launch.rank, launch.security
    host, port = _main(launch.environment, f"num_nodes={rank.nodes}")
    if PORT in os.environ:
        if not os.environ[PORT].isdecimal() or not 0 < int(os.environ[PORT]) < 1 << 16:
            raise SettingError(f"{PORT}={os.environ[PORT]} must be a port, 1 to 65535, that is free on every node")
        port = int(os.environ[PORT])
    else:
        port += 1
    coordinator = joined(host.strip("[]"), port)
    if security.token is None:
        raise SettingError(
            f"num_nodes={rank.nodes} needs a secret that all nodes share; set {TOKEN} to the same long random value on"
            " each of them (docs/several-machines.md has commands that make one, and certificates)"
        )
    if is_loopback(host):
        return coordinator, security  # a user who tries several nodes on one machine
    if not security.encrypted and not security.insecure:
        raise SettingError(
            f"num_nodes={rank.nodes} has a server on {coordinator}, open to other machines, without certificates; set"
            " HETPIPE_CA, HETPIPE_CERTIFICATE and HETPIPE_KEY to PEM files (docs/several-machines.md has commands that"
            " make them), or, on a network that you trust, WSPCallback(security={'insecure': True}), on the command"
            " line strategy.wsp.security.insecure=true"
        )
    if rank.index == 0 and is_loopback(address := str(_resolved(host, 0)[1][0])):
        raise SettingError(
            f"MASTER_ADDR={host} means {address} on node 0, which other nodes cannot reach; set MASTER_ADDR"
            " to node 0's address in the network, on every node"
        )
    return coordinator, security


def _main(environment: ClusterEnvironment, why: str) -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT from the environment."""
    if isinstance(environment, LightningEnvironment):  # this environment makes up missing values
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise SettingError(
                f"{why} needs {' and '.join(missing)}; set MASTER_ADDR to the first node's address and MASTER_PORT to a"
                " free port of its, the same values for every process"
            )
    try:
        return environment.main_address, environment.main_port
    except ValueError:
        raise SettingError(
            f"MASTER_PORT={os.environ.get('MASTER_PORT')} must be a port of the first node, such as 29500, the same"
            " value for every process"
        ) from None


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return the family and address of ``host`` for a socket."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise SettingError(
            f"MASTER_ADDR={host} is not known on this node ({error.strerror}); give node 0's address in the network"
        ) from None
    return family, address


def _launch_of(environment: ClusterEnvironment) -> str:
    """Return the launch id on this machine."""
    host, port = _main(environment, "a launch that processes come to which it has not started")
    run = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")]
    return "/".join([host, str(port), *run])
