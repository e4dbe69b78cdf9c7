"""Wave Synchronous Parallel: how virtual workers share what they learn (HetPipe, section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal

import lightning as L

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.rules.parameter_placement import PLACEMENTS
from lightning_hetpipe.server.transport.security import Security, split
from lightning_hetpipe.settings import MOST, Bounds, Choices, Duration, Length, read, seconds
from lightning_hetpipe.strategy.relations import check_lengths


def _is_address(value: str) -> bool:
    try:
        return split(value)[1] > 0
    except SettingError:
        return False


def _are_distinct(values: Sequence[str]) -> bool:
    return len({*values}) == len(values)


Address = Annotated[str, _is_address, "host:port with a port from 1 to 65535, such as '10.0.0.1:5000'"]
_Length = Annotated[int, Bounds(1, MOST)]


class WSPCallback(L.Callback):
    """Settings of the synchronisation of virtual workers; given to the Trainer as a callback, or to the strategy.

    Args:
        clock_distance: D, the number of waves that a virtual worker may be ahead of the slowest one. None is the
            plan's, or 0.
        wave: W, minibatches per wave. "auto" is the plan's, or Nm.
        shares: Minibatches per wave of each virtual worker, in proportion to which each epoch is dealt
            (docs/virtual-workers.md#unequal-virtual-workers). "auto" measures their rates in each epoch, and ``wave``
            is the shortest wave. None is the plan's unless ``wave`` is set, or "equal".
        aggregate: "sum" adds the updates of virtual workers (the paper's rule, which acts like an N times larger
            learning rate), "mean" their mean.
        update_dtype: Dtype in which updates travel; "bfloat16" halves them. The rounding error is added to the next
            update. None is the dtype of each parameter.
        servers: Addresses of running ``hetpipe-server``s; by default each machine starts one.
        placement: Server of each parameter: "size" balances their bytes, "round_robin" deals parameters out in turn.
            "local" leaves each parameter beside virtual worker 0's stage that has it, which is the first machine's
            server unless its stages are on several machines. With "local", weights survive without other machines, but
            one link may carry everything. None is the plan's, or "size".
        security: Certificates and token of the servers (docs/several-machines.md#secrets). What is left out comes from
            the environment variables ``HETPIPE_*``.
        lease: Time that a virtual worker may be silent before the others go on without it.
        end_timeout: Time that the first process of a machine, at its end, waits for the programs of other virtual
            workers. Then it ends the programs that it has started, and exits with 1. None waits as long as they run.
        join_timeout: Time that virtual workers wait, at the start and at the start of each fit, for one that has not
            come. Then all end, and the error says who is missing.
        restarts: Times that a virtual worker whose process ends in the middle of a run is started again, by the process
            that started it. It comes back when the next epoch begins (docs/virtual-workers.md#coming-back). Under
            ``hetpipe-train`` on one machine it counts for the run as well, which is started again from its newest
            checkpoint if virtual worker 0 is lost (docs/virtual-workers.md#when-virtual-worker-0-is-lost).

    Raises:
        SettingError: one sentence that names the setting, its value and the way out.
    """

    def __init__(
        self,
        clock_distance: Annotated[int, Bounds(0, MOST)] | None = None,
        wave: _Length | Literal["auto"] = "auto",
        shares: Annotated[
            Sequence[_Length], Length(1), "the minibatches in a wave of each virtual worker, such as [4, 8]"
        ]
        | Literal["equal", "auto"]
        | None = None,
        aggregate: Annotated[str, Choices(("sum", "mean"))] = "sum",
        update_dtype: Annotated[str, Choices(("bfloat16", "float16", "float32"))] | None = None,
        servers: Annotated[
            Sequence[Address], Length(1), _are_distinct, "a list of addresses, each once, such as ['10.0.0.1:5000']"
        ]
        | None = None,
        placement: Annotated[str, Choices(PLACEMENTS)] | None = None,
        security: Security | Mapping[str, Any] | None = None,
        lease: Duration = timedelta(seconds=30),
        end_timeout: Duration | None = None,
        join_timeout: Duration = timedelta(minutes=10),
        restarts: Annotated[int, Bounds(0, MOST)] = 0,
    ) -> None:
        given = read(WSPCallback, locals())
        check_lengths(wave, shares)
        if security is not None and not isinstance(security, Security):
            _ = given.security.from_environment().encrypted  # raises where files are missing
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
