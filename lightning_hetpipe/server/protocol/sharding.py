"""Placement of parameters on servers. A parameter is never divided."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.protocol.messages import Parameter
from lightning_hetpipe.server.protocol.shard import dtype_of


def place(parameters: Sequence[Parameter], servers: int, how: str) -> list[list[int]]:
    """Return the indices of the parameters on each server, ascending.

    Args:
        how: "size" gives each parameter, the largest first, to the server that has the fewest bytes, so that each
            machine's link carries about the same; "round_robin" goes through them in turn; "local" leaves all with the
            coordinator, which lies beside VW 0, whose own updates then cross no network, and no other machine takes
            weights with it when it is lost. (The paper's ED-local puts a parameter beside the stage that owns it in
            every VW; our VWs each lie on one machine, so only one machine can be local to all parameters.)

    Raises:
        SettingError: for another ``how``.
    """
    found: list[list[int]] = [[] for _ in range(servers)]
    if how == "round_robin":
        for index in range(len(parameters)):
            found[index % servers].append(index)
    elif how == "local":
        found[0] = list(range(len(parameters)))
    elif how == "size":
        sizes = [math.prod(parameter.shape) * dtype_of(parameter.dtype).itemsize for parameter in parameters]
        held = [0] * servers
        for index in sorted(range(len(parameters)), key=lambda index: (-sizes[index], index)):
            server = held.index(min(held))
            found[server].append(index)
            held[server] += sizes[index]
        for indices in found:
            indices.sort()
    else:
        raise SettingError(f"WSPCallback(placement={how!r}) is not known; use 'size', 'round_robin' or 'local'")
    return found
