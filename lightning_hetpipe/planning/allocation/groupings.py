"""Groupings of a cluster's devices into virtual workers (HetPipe, section 6).

Of four nodes with two devices each, V the fastest and Q the slowest:

===================  ==================================  ==========================
NP, node partition   one virtual worker per node         VV, RR, GG, QQ
ED, equal            number i takes the i-th device of   VRGQ, VRGQ
distribution         every node
HD, hybrid           nodes paired, the strongest with    VQ, VQ, RG, RG
distribution         the weakest; two virtual workers
                     per pair, each with half of both
===================  ==================================  ==========================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot

Group: TypeAlias = tuple[DeviceSlot, ...]
"""Devices of one virtual worker, node by node."""

Grouping: TypeAlias = tuple[Group, ...]
"""Devices of each virtual worker. They are disjoint, except for the device of all last stages in ``placed``."""


def node_partition(cluster: Cluster, speed: Callable[[DeviceSlot], float]) -> Grouping:
    """NP: make one virtual worker per node."""
    return cluster.slots_by_node


def equal_distribution(cluster: Cluster, speed: Callable[[DeviceSlot], float]) -> Grouping:
    """ED: virtual worker i takes the i-th device of every node.

    Raises:
        SettingError: if nodes have unequal numbers of devices.
    """
    nodes = cluster.slots_by_node
    for node, own in zip(cluster.nodes, nodes, strict=True):
        if len(own) != len(nodes[0]):
            raise SettingError(
                f"allocation='ed' takes one device of every node for each virtual worker, and node"
                f" '{cluster.nodes[0].name}' has {len(nodes[0])} where '{node.name}' has {len(own)}; use 'np' or"
                " 'auto', or declare as many devices on each node"
            )
    return tuple(zip(*nodes, strict=True))


def hybrid_distribution(cluster: Cluster, speed: Callable[[DeviceSlot], float]) -> Grouping:
    """HD: pair the strongest node with the weakest. Each pair makes two virtual workers with half of both nodes.

    The strength of a node is the sum of its devices' ``speed``. Of equal nodes the first one is stronger.

    Raises:
        SettingError: if the number of nodes, or of devices of a node, is odd.
    """
    nodes = cluster.slots_by_node
    if len(nodes) % 2:
        raise SettingError(
            f"allocation='hd' pairs the nodes, and the cluster has {len(nodes)}, an odd number; use 'np' or 'auto'"
        )
    for node, own in zip(cluster.nodes, nodes, strict=True):
        if len(own) % 2:
            raise SettingError(
                f"allocation='hd' halves the devices of each node, and node '{node.name}' has {len(own)}, an odd"
                " number; use 'np' or 'auto', or declare an even number"
            )
    order = sorted(nodes, key=lambda own: -sum(map(speed, own)))
    pairs = zip(order[: len(order) // 2], reversed(order[len(order) // 2 :]), strict=True)
    return tuple((*one[half::2], *other[half::2]) for one, other in pairs for half in (0, 1))


GROUPINGS: dict[str, Callable[[Cluster, Callable[[DeviceSlot], float]], Grouping]] = {
    "np": node_partition,
    "ed": equal_distribution,
    "hd": hybrid_distribution,
}
"""Grouping functions by the value of the setting ``allocation``."""

PLACED = "placed"
"""Value of ``allocation`` for a placement of layers instead of a grouping (``placed.py``)."""

ALLOCATIONS = (*GROUPINGS, PLACED, "auto")
"""All values of the setting ``allocation``."""
