"""Placement of parameters on servers. A parameter is never divided."""

from __future__ import annotations

from collections.abc import Sequence

PLACEMENTS = ("size", "round_robin", "local")
CANDIDATES = ("size", "local")
"""Placements among which a plan chooses: dealing parameters out in turn is never better than by size."""


def place(sizes: Sequence[int], servers: int, how: str, homes: Sequence[int] = ()) -> list[list[int]]:
    """Return the indices of the parameters on each server, ascending.

    Args:
        sizes: Bytes of each parameter.
        servers: How many there are. Server 0 is the coordinator, which lies beside virtual worker 0.
        how: "size" gives each parameter, the largest first, to the server that has the fewest bytes, so that each
            machine's link carries about the same; "round_robin" goes through them in turn; "local" leaves each with the
            server beside virtual worker 0's stage that holds it. Where the stages of all virtual workers that hold it
            lie on one node (the paper's ED-local, HetPipe, section 7), its updates cross no network. Where virtual
            worker 0 lies on one node, all are left with the coordinator. No machine without a stage of virtual worker
            0, which nobody goes on without, takes weights with it when it is lost.
        homes: For each parameter, the server beside virtual worker 0's stage that holds it; nothing where that is the
            coordinator for all.
    """
    found: list[list[int]] = [[] for _ in range(servers)]
    if how == "round_robin":
        for index in range(len(sizes)):
            found[index % servers].append(index)
    elif how == "local":
        for index in range(len(sizes)):
            found[homes[index] if homes else 0].append(index)
    else:
        held = [0] * servers
        for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
            server = held.index(min(held))
            found[server].append(index)
            held[server] += sizes[index]
        for indices in found:
            indices.sort()
    return found
