"""Declarations of all settings: the constructors of ``HetPipeStrategy`` and ``WSPCallback``.

This module does not load Lightning, because commands check settings before they load Lightning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.planning.allocation.groupings import ALLOCATIONS
from lightning_hetpipe.planning.model.cluster import Cluster
from lightning_hetpipe.planning.plan.document import MOST_IN_FLIGHT, Plan
from lightning_hetpipe.rules.channel_layouts import is_share
from lightning_hetpipe.rules.versions import POLICIES
from lightning_hetpipe.rules.waves import PLACEMENTS
from lightning_hetpipe.server.protocol.identifiers import MOST_VIRTUAL_WORKERS
from lightning_hetpipe.server.transport.security import Security, split
from lightning_hetpipe.settings import MOST, Bounds, Choices, Duration, KnownNames, Length, read, seconds
from lightning_hetpipe.strategy.relations import check_lengths

if TYPE_CHECKING:
    import torch
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision

    from lightning_hetpipe.strategy.virtual_workers import WSPCallback

LONGEST = 2000
"""Largest number of minibatches in a timeline. Their trace has about 20 MB, which a viewer still opens at ease."""


def _is_range(value: Sequence[int]) -> bool:
    return len(value) == 2 and 1 <= value[0] <= value[1] <= MOST_VIRTUAL_WORKERS


def _is_address(value: str) -> bool:
    try:
        return split(value)[1] > 0
    except SettingError:
        return False


Stages = int | Literal["auto"]
Count = Annotated[Stages, Bounds(1, MOST_IN_FLIGHT)]
"""Number of stages, or of minibatches in flight."""
_TAKEN = ("backend", "mode", "dynamic", "options")
CompileOptions = Annotated[
    Mapping[str, Any],
    lambda value: value.keys() <= set(_TAKEN),
    f"some of torch.compile's arguments {', '.join(_TAKEN)}, such as {{'mode': 'max-autotune-no-cudagraphs'}}",
]
Address = Annotated[str, _is_address, "host:port with a port from 1 to 65535, such as '10.0.0.1:5000'"]
StageShares = Annotated[
    Sequence[float],
    Length(2),
    lambda shares: all(map(is_share, shares)) and any(shares),
    "a share for each of at least two devices, 0 or more, such as [2, 1], of which the first device has the unsplit"
    " weights",
]
StageNumber = Annotated[int | str, lambda value: str(value).isdecimal(), "the number of a stage, from 0 on"]
"""Key of ``split``. In configurations, keys are text."""
WaveLength = Annotated[int, Bounds(1, MOST)]


class HetPipeArguments(KnownNames):
    """Constructor of ``HetPipeStrategy``, whose docstring says what each setting means."""

    def __init__(
        self,
        stages: Count | Annotated[Sequence[Count], "a list with one for each virtual worker"] = "auto",
        in_flight: Count = "auto",
        virtual_workers: Annotated[int, Bounds(1, MOST_VIRTUAL_WORKERS)]
        | Annotated[Sequence[int], _is_range, "the fewest and the most of them, as (1, 3)"] = 1,
        weights: Annotated[str, Choices(("auto", *POLICIES))] = "auto",
        module: Annotated[str, "the name of a module"]
        | Annotated[Sequence[str], Length(1), "a list of names"]
        | None = None,
        plan: Plan | Annotated[str | os.PathLike[str], "the path of one"] | None = None,
        cluster: Cluster | None = None,
        allocation: Annotated[str, Choices(ALLOCATIONS)] = "auto",
        compile: bool | Annotated[str, bool, "the name of a backend of torch.compile"] | CompileOptions = False,
        recompute: bool = False,
        split: bool
        | Literal["auto"]
        | Annotated[
            Mapping[StageNumber, StageShares], Length(1), "the shares of each stage on several devices, as {0: [2, 1]}"
        ] = False,
        timeline: bool
        | Annotated[
            Sequence[int],
            lambda value: len(value) == 2 and 1 <= value[0] <= value[1] < value[0] + LONGEST,
            f"the first and the last minibatch to keep, counted from 1, at most {LONGEST}, such as (100, 120)",
        ] = False,
        stage_hosts: Annotated[
            Mapping[Any, Address],
            Length(1),
            "the address of a host for each node of a plan, such as {'attic': '10.0.0.2:7071'}",
        ]
        | None = None,
        lr_correction: Annotated[int, Bounds(1, MOST)] | Literal["auto"] | None = "auto",
        wsp: WSPCallback | None = None,
        timeout: Duration = timedelta(minutes=5),
        capture_timeout: Duration = 60.0,
        grace: Duration = timedelta(seconds=30),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self._take(locals())

    def _take(self, arguments: Mapping[str, Any]) -> None:
        raise NotImplementedError


class WSPArguments(KnownNames):
    """Constructor of ``WSPCallback``, whose docstring says what each setting means.

    Attributes:
        settings: Its checked arguments.
    """

    def __init__(
        self,
        clock_distance: Annotated[int, Bounds(0, MOST)] | None = None,
        wave: WaveLength | Literal["auto"] = "auto",
        shares: Annotated[
            Sequence[WaveLength], Length(1), "the minibatches in a wave of each virtual worker, such as [4, 8]"
        ]
        | Literal["equal", "auto"]
        | None = None,
        aggregate: Annotated[str, Choices(("sum", "mean"))] = "sum",
        update_dtype: Annotated[str, Choices(("bfloat16", "float16", "float32"))] | None = None,
        servers: Annotated[
            Sequence[Address],
            Length(1),
            lambda addresses: len({*addresses}) == len(addresses),
            "a list of addresses, each once, such as ['10.0.0.1:5000']",
        ]
        | None = None,
        placement: Annotated[str, Choices(PLACEMENTS)] | None = None,
        security: Security | Mapping[str, Any] | None = None,
        lease: Duration = timedelta(seconds=30),
        end_timeout: Duration | None = None,
        join_timeout: Duration = timedelta(minutes=10),
        restarts: Annotated[int, Bounds(0, MOST)] = 0,
    ) -> None:
        given = read(WSPArguments, locals())
        check_lengths(wave, shares)
        if security is not None and not isinstance(security, Security):
            _ = given.security.from_environment().encrypted  # raises if files are missing
        own_wave = None if wave == "auto" else wave
        planned = {"clock_distance": clock_distance, "wave": own_wave, "shares": shares, "placement": placement}
        values: dict[str, Any] = {
            "clock_distance": clock_distance or 0,
            "shares": tuple(shares) if shares is not None and not isinstance(shares, str) else shares or "equal",
            "servers": None if servers is None else tuple(servers),
            "placement": placement or "size",
            "security": given.security or Security(),
            "lease": seconds(lease),
            "end_timeout": None if end_timeout is None else seconds(end_timeout),
            "join_timeout": seconds(join_timeout),
            "left_out": frozenset(name for name, value in planned.items() if value is None),
        }
        self.settings = WSPSettings(**{**vars(given), **values})
