"""Rank of this process among the virtual workers, for any starter, and its devices."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch.parent_watch import this_child

# Number of processes on this node by torchrun, Open MPI and MPICH.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_NODES = ("GROUP_WORLD_SIZE", "SLURM_NNODES")
# SLURM's tasks of each node: 4(x2),1 is 4, 4 and 1. The step's tasks, which srun sets, come before the job's.
_SLURM_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_OF_SRUN = {"SLURM_NTASKS", "SLURM_PROCID"}


class WorkerRange(NamedTuple):
    """Numbers of virtual workers on all nodes: the least with which a run begins, and the most that take part."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"[{self.least}, {self.most}]"


class Role(Enum):
    """The starter of this process."""

    FIRST = "a user; it starts the node's other virtual workers"
    CHILD = "our launcher"
    EXTERNAL = "torchrun, SLURM or the like, which started the others too"
    HOST = "anybody; it is no virtual worker, as its node only serves stages of others', or has as many as are planned"


@dataclass(frozen=True)
class Rank:
    """Place of this process among the virtual workers. One process is one virtual worker.

    Attributes:
        index: i, this virtual worker among all, from 0. N for a process that is no virtual worker.
        size: N, the number of all virtual workers.
        node: This node among ``nodes``, from 0.
        local: This virtual worker among the virtual workers of its node, from 0.
        per_node: Number of virtual workers on this node. Other nodes may have other numbers.
        of_nodes: Number of virtual workers on each of several nodes, if known, else empty.
        least: Number of virtual workers with which a run begins, or 0 for all. If not 0, ``size`` and the other numbers
            count seats, which need not all be taken.
    """

    index: int
    size: int
    node: int
    local: int
    per_node: int
    nodes: int
    role: Role
    of_nodes: tuple[int, ...] = ()
    least: int = 0

    @property
    def started(self) -> int:
        """Number of this node's virtual workers that its first process is or starts. More may come later from
        elsewhere."""
        return min(self.per_node, self.least) if self.least and self.nodes == 1 else self.per_node

    @property
    def has_room(self) -> bool:
        """True if processes may come to this node that were not started with this process."""
        return self.started < self.per_node


def find_rank(
    virtual_workers: int | WorkerRange, num_nodes: int, environment: ClusterEnvironment, planned: Sequence[int] = ()
) -> Rank:
    """Return the rank of this process.

    Args:
        virtual_workers: The setting: virtual workers on each node, or a range for all nodes. The default 1 leaves the
            number to torchrun.
        num_nodes: The Trainer's number. The default 1 leaves the number to torchrun.
        environment: The environment that Lightning detected, or the user gave.
        planned: Virtual workers on each node by a plan, instead of ``virtual_workers``. A node with 0 serves stages of
            virtual workers of other nodes.

    Raises:
        SettingError: if settings, plan and started processes do not agree.
    """
    if planned and num_nodes not in (1, len(planned)):
        raise SettingError(
            f"num_nodes={num_nodes}, but the plan has {_of(planned)} on {_nodes(len(planned))}; set"
            f" num_nodes={len(planned)}, or plan for {_nodes(num_nodes)}"
        )
    child, environment = this_child(), _starter(environment)
    if child is None and _has_started(environment):
        if isinstance(virtual_workers, WorkerRange):
            return _as_started_of(virtual_workers, num_nodes, environment, planned)
        return _as_started(virtual_workers, num_nodes, environment, planned)
    of_nodes = tuple(planned) or _on_each(virtual_workers, num_nodes)
    if len(of_nodes) > num_nodes:
        raise SettingError(
            f"the plan has {_of(planned)} on {len(of_nodes)} nodes, and num_nodes={num_nodes}; set"
            f" Trainer(num_nodes={len(of_nodes)}) and start the program on each of them, with NODE_RANK=0 on the plan's"
            " first node, or give the cluster, too, to emulate all of them on a CPU"
        )
    try:
        node = environment.node_rank()
    except ValueError:
        raise SettingError(
            f"NODE_RANK={os.environ.get('NODE_RANK')} must be a whole number: 0 on the first node, 1 on the next"
            " one, and so on"
        ) from None
    if not 0 <= node < num_nodes:
        raise SettingError(
            f"NODE_RANK={node} is beyond num_nodes={num_nodes}; set num_nodes to the number of nodes, and NODE_RANK to"
            " 0 to num_nodes - 1"
        )
    here = of_nodes[node]
    if not here:
        return _rank(of_nodes, node, 0, Role.HOST)
    role, local, least = Role.FIRST, 0, virtual_workers.least if isinstance(virtual_workers, WorkerRange) else 0
    if child is not None:
        role, local = Role.CHILD, child.local
        if child.per_node != here:
            raise other_number(here, child.per_node)
    elif environment.creates_processes_externally:  # a user started and numbered each process
        role, local = Role.EXTERNAL, environment.local_rank()
    if not 0 <= local < here:
        raise SettingError(
            f"LOCAL_RANK={local} is beyond virtual_workers={virtual_workers if least else here} on this node; give"
            " LOCAL_RANK=0 to"
            f" {here - 1}, or unset it, or set virtual_workers, or plan, for the processes of each node"
        )
    return _rank(of_nodes, node, local, role, least)


def _rank(of_nodes: Sequence[int], node: int, local: int, role: Role, least: int = 0) -> Rank:
    """Make the rank of process ``local`` of ``node``, given the numbers of virtual workers on all nodes."""
    return Rank(
        index=sum(of_nodes) if role is Role.HOST else sum(of_nodes[:node]) + local,
        size=sum(of_nodes),
        node=node,
        local=local,
        per_node=of_nodes[node],
        nodes=len(of_nodes),
        role=role,
        of_nodes=tuple(of_nodes) if len(of_nodes) > 1 else (),
        least=least,
    )


def _on_each(virtual_workers: int | WorkerRange, nodes: int) -> tuple[int, ...]:
    """Return the number of virtual workers, or of seats for them, on each node."""
    if not isinstance(virtual_workers, WorkerRange):
        return (virtual_workers,) * nodes
    if virtual_workers.most % nodes:
        raise SettingError(
            f"virtual_workers={virtual_workers} are those of all {nodes} nodes, of which each has as many; give a"
            f" maximum that is a multiple of {nodes}"
        )
    return (virtual_workers.most // nodes,) * nodes


def _as_started_of(
    virtual_workers: WorkerRange, num_nodes: int, environment: ClusterEnvironment, planned: Sequence[int]
) -> Rank:
    """Return the rank of this process if an external launcher (torchrun, SLURM) started several ranks of a range."""
    started = _as_started(1, num_nodes, environment, ())
    nodes = max(num_nodes, started.nodes)
    seats = tuple(planned) or _on_each(virtual_workers, nodes)
    if started.size > virtual_workers.most or started.node >= nodes or started.local >= seats[started.node]:
        raise SettingError(
            f"virtual_workers={virtual_workers}, but {started.size} processes were started, and this one, process"
            f" {started.local} of node {started.node}, is beyond the maximum; start fewer, or raise the maximum"
        )
    return _rank(seats, started.node, started.local, Role.EXTERNAL, max(virtual_workers.least, started.size))


def count_nodes(num_nodes: int, environment: ClusterEnvironment) -> int:
    """Return the number of nodes with processes: an external launcher's number, or the Trainer's ``num_nodes``."""
    if not _has_started(_starter(environment)):
        return num_nodes
    return next((int(os.environ[name]) for name in _NODES if name in os.environ), num_nodes)


def _starter(environment: ClusterEnvironment) -> ClusterEnvironment:
    if isinstance(environment, SLURMEnvironment) and _OF_SRUN - os.environ.keys():
        return LightningEnvironment()  # a script that names the plugin, started by a user without srun
    return environment


def _has_started(environment: ClusterEnvironment) -> bool:
    """Return True if an external launcher (torchrun, SLURM) has started and numbered all processes."""
    return not isinstance(environment, LightningEnvironment) and environment.creates_processes_externally


def other_number(virtual_workers: int, running: int) -> SettingError:
    """Make the error that a program asks for another number of virtual workers than it has processes."""
    return SettingError(
        f"virtual_workers={virtual_workers}, but the processes of this program are {running} virtual workers on each"
        f" node already; give every HetPipeStrategy of the program virtual_workers={running}, or train the rest with"
        " another strategy or in another program"
    )


def _as_started(virtual_workers: int, num_nodes: int, environment: ClusterEnvironment, planned: Sequence[int]) -> Rank:
    """Return the rank if each started process is a virtual worker. Nodes may have different numbers of them."""
    size, node, local = environment.world_size(), environment.node_rank(), environment.local_rank()
    nodes = count_nodes(num_nodes, environment)
    if num_nodes not in (1, nodes):
        raise SettingError(f"num_nodes={num_nodes}, but processes were started on {nodes}; leave num_nodes out")
    per_node = _started_here(size, node)
    if per_node is None:
        if size % nodes:
            raise SettingError(
                f"num_nodes={num_nodes} does not divide the {size} processes that were started; set num_nodes to the"
                " number of nodes"
            )
        per_node = size // nodes
    if virtual_workers not in (1, per_node):
        raise SettingError(
            f"virtual_workers={virtual_workers}, but {per_node} processes were started on this node, and each is one"
            f" virtual worker; start {virtual_workers} on each node, or leave virtual_workers out"
        )
    if planned and not _as_planned(planned, nodes, node, per_node, size):
        *most, last = map(str, planned)
        numbers = f"{', '.join(most)} and {last}" if most else last
        raise SettingError(
            f"the plan has {numbers} virtual workers on {_nodes(len(planned))}, but {size} processes were"
            f" started on {_nodes(nodes)}, {per_node} of them on node {node}, which this is; start one process for each"
            " virtual worker of the plan, in its order, and one on each node without any"
        )
    if 0 in planned:
        return _rank(planned, node, local, Role.HOST if local >= planned[node] else Role.EXTERNAL)
    known = tuple(planned)
    if nodes == 2 and not known:
        known = (per_node, size - per_node) if node == 0 else (size - per_node, per_node)
    of_nodes = known if nodes > 1 else ()
    return Rank(environment.global_rank(), size, node, local, per_node, nodes, role=Role.EXTERNAL, of_nodes=of_nodes)


def _as_planned(planned: Sequence[int], nodes: int, node: int, per_node: int, size: int) -> bool:
    """Return True if each planned virtual worker has a process. If some nodes have none, additional processes serve or
    wait."""
    if len(planned) != nodes:
        return False
    if 0 in planned:
        return per_node >= max(1, planned[node])
    return (planned[node], sum(planned)) == (per_node, size)


def _of(planned: Sequence[int]) -> str:
    return "stages" if 0 in planned else "virtual workers"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _started_here(size: int, node: int) -> int | None:
    """Return the number of processes started on this node, if an environment variable says it."""
    for name in _LOCAL_SIZES:
        if name in os.environ:
            return int(os.environ[name])
    for name in _SLURM_TASKS:
        tasks: list[int] = []
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get(name, "")):
            tasks += [int(count)] * int(times or 1)
        if sum(tasks) == size and node < len(tasks):
            return tasks[node]
    return None


def devices_of(devices: Sequence[torch.device], local: int, per_node: int) -> list[torch.device]:
    """Return the devices of virtual worker ``local`` of a node: a contiguous block. Earlier virtual workers get larger
    blocks. On a CPU, virtual workers may share ``devices``. Raise SettingError if there are fewer accelerators than
    virtual workers."""
    if len(devices) < per_node:
        if all(device.type == "cpu" for device in devices):
            return list(devices)
        raise SettingError(
            f"virtual_workers={per_node} on a node need a device each, and this process sees {len(devices)}"
            f" ({', '.join(map(str, devices))}); set fewer virtual_workers, or let every process see all devices of its"
            " node"
        )
    each, larger = divmod(len(devices), per_node)
    first = local * each + min(local, larger)
    return list(devices[first : first + each + (local < larger)])


def announce(rank: Rank) -> None:
    """Make only virtual worker 0 print, warn and log, as Lightning does for rank 0."""
    known: Any = rank_zero_only  # a function, on which Lightning keeps the rank
    known.rank = rank.index
