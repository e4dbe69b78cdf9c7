"""Placement of parameters on servers. A parameter is never divided."""

from __future__ import annotations

from collections.abc import Sequence

PLACEMENTS = ("size", "round_robin", "local")
CANDIDATES = ("size", "local")
"""Placements among which a plan chooses. "round_robin" is left out, because it is never better than "size"."""


def place(sizes: Sequence[int], servers: int, how: str, homes: Sequence[int] = ()) -> list[list[int]]:
    """Return the ascending indices of the parameters, with bytes ``sizes``, on each server.

    Server 0 is the coordinator, beside virtual worker 0. Values of ``how``:

    - "size" gives each parameter, the largest first, to the server with the fewest bytes, so that links carry equal
      loads.
    - "round_robin" deals parameters out to servers in turn.
    - "local" leaves each parameter with its server in ``homes``, beside the stage of virtual worker 0 that holds it. If
      all virtual workers hold it on one node (the paper's ED-local, HetPipe, section 7), its updates cross no network.
      If virtual worker 0 lies on one node, or ``homes`` is empty, the coordinator has all parameters. No run goes on
      without virtual worker 0. So a machine without one of its stages has no weights to lose.
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
