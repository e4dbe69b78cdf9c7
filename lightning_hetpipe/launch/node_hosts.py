"""Hosts of a launch whose virtual workers have stages on several nodes: this process starts and finds hosts.

a node without a leader    its first process starts hosts and, with several virtual workers, a parameter server. It
                           serves until node 0 has ended
any other node             its first process starts hosts, if the node has stages of other nodes' virtual workers
node 0                     its first process listens on MASTER_ADDR, at the port after that of its server, where all
                           nodes meet (``hosts/host_rendezvous.py``)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_hetpipe.errors import SettingError, say
from lightning_hetpipe.hosts import host_server
from lightning_hetpipe.hosts.host_rendezvous import Arrival, HostRendezvous, Meeting
from lightning_hetpipe.hosts.secured_socket import check_names
from lightning_hetpipe.launch import servers
from lightning_hetpipe.launch.ends import lost_workers
from lightning_hetpipe.launch.ranks import Rank, Role
from lightning_hetpipe.launch.servers import LaunchSettings, ServingNodes
from lightning_hetpipe.server.process.signals import INTERRUPTED, TERMINATED
from lightning_hetpipe.server.transport.security import Security, joined, split

HOST_PORT = 2
"""Distance of the port of a node's hosts from the port of its server, if HETPIPE_PORT sets the latter."""


@dataclass(frozen=True)
class FoundHosts:
    """Addresses at which nodes serve: addresses of ``hosts`` by the names of their nodes, and of parameter ``servers``
    on nodes without a virtual worker."""

    hosts: Mapping[str, str]
    servers: tuple[str, ...]


_ENDS = {INTERRUPTED: "was interrupted", TERMINATED: "was told to end, by SIGTERM"}
"""End of node 0's program, as text, by its exit code."""

_own: Arrival | None = None
_rendezvous: HostRendezvous | None = None
_found: FoundHosts | None = None


def start(launch: LaunchSettings) -> None:
    """Start what this process's node serves, and on node 0 the meeting of all nodes, unless done or without serving
    nodes. ``servers.stop`` ends them. Raise SettingError if an address cannot be used, or would be open to
    strangers."""
    global _own, _rendezvous
    rank, nodes = launch.rank, launch.nodes
    if _own is not None or nodes is None:
        return
    coordinator, security = servers.over_nodes(launch)
    server, is_virtual_worker = "", rank.role is not Role.HOST
    if not is_virtual_worker and rank.local == 0 and rank.size > 1 and launch.wsp.servers is None:
        servers.start(launch)
        server = servers.own_address()
    _own = Arrival(rank.node, nodes.plan, _host(rank, coordinator, security, nodes), server, not is_virtual_worker)
    servers.until_end(_end)
    if rank.index == 0:
        serving = {nodes.names.index(name): name for name in nodes.stages}
        _rendezvous = HostRendezvous(_meeting(coordinator), security, _own, serving).__enter__()


def find(launch: LaunchSettings) -> FoundHosts | None:
    """Wait for all serving nodes, and return their addresses, or None without such nodes. Raise as :func:`start` does,
    and SettingError if some nodes do not come in time."""
    global _found
    if (nodes := launch.nodes) is None:
        return None
    start(launch)
    if _found is None:
        if _rendezvous is not None:
            arrived = _rendezvous.everyone(launch.wsp.join_timeout)
        else:
            with _at_node_0(launch) as meeting:
                arrived = meeting.everyone(launch.wsp.join_timeout)
        _found = FoundHosts(
            {nodes.names[each.node]: each.host for each in arrived},
            tuple(each.server for each in arrived if each.server),
        )
    return _found


def serve(launch: LaunchSettings) -> int:
    """Serve until node 0 has ended. Return its exit code, or 1 if it ended without one. Raises as :func:`find` does."""
    node, nodes = launch.rank.node, launch.nodes
    assert nodes is not None
    name = nodes.names[node]
    try:
        start(launch)
        with _at_node_0(launch) as meeting:
            meeting.everyone(launch.wsp.join_timeout)
            if _own is not None and _own.host:
                say(f"this is {name} (NODE_RANK={node}) of the plan, and serves {nodes.stages[name]}")
            status = meeting.status()
    finally:
        servers.stop()
    if status is None:
        say(f"node 0 was lost, or has ended without a word, and with it ends the service of {name}")
        return 1
    if status:
        how = _ENDS.get(status, "has failed; see its output")
        say(f"node 0's program {how}; with it ends the service of {name} with exit code {status}")
    return status


def _end() -> None:
    """Report the end of this process to the nodes that serve it."""
    global _own, _rendezvous, _found
    if _rendezvous is not None:
        _rendezvous.end(lost_workers.status)
    _own = _rendezvous = _found = None


def _host(rank: Rank, coordinator: str, security: Security, nodes: ServingNodes) -> str:
    """If this is the first process of a serving node, start the node's hosts, and return their address."""
    if rank.local or nodes.names[rank.node] not in nodes.stages:
        return ""
    given, host = os.environ.get(servers.PORT), servers.host_of_node(rank, coordinator)
    check_names(security, host)
    address = joined(host, int(given) + HOST_PORT if given else 0)
    try:
        server = host_server.HostServer(address, security).__enter__()
    except SettingError as error:
        if given is None:
            raise
        raise SettingError(
            f"the hosts of this node cannot listen on {address}, {HOST_PORT} after {servers.PORT}={given}; give another"
            f" {servers.PORT} ({error})"
        ) from None
    servers.until_end(server.__exit__)
    return server.address


def _at_node_0(launch: LaunchSettings) -> Meeting:
    """Come to node 0, at which all nodes meet."""
    coordinator, security = servers.over_nodes(launch)
    assert _own is not None
    return Meeting(_meeting(coordinator), security, _own, launch.timeout)


def _meeting(coordinator: str) -> str:
    """Return the address at which all nodes meet."""
    host, port = split(coordinator)
    return joined(host, port + 1)
