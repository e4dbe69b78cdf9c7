"""Placement of a run's parameters on its servers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetpipe.rules import parameter_placement
from lightning_hetpipe.server.protocol.messages import Parameter
from lightning_hetpipe.server.protocol.shard import dtype_of


def place(parameters: Sequence[Parameter], servers: int, how: str, homes: Sequence[int] = ()) -> list[list[int]]:
    """Return the indices of the parameters on each server, ascending.

    Args:
        how, homes: As for :func:`~lightning_hetpipe.rules.parameter_placement.place`.

    Raises:
        SettingError: for another ``how``.
    """
    sizes = [math.prod(parameter.shape) * dtype_of(parameter.dtype).itemsize for parameter in parameters]
    return parameter_placement.place(sizes, servers, how, homes)
