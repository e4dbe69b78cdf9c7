"""Wave Synchronous Parallel: how virtual workers share what they learn (HetPipe, section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Annotated, Any, Literal

import lightning as L

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.rules.parameter_placement import PLACEMENTS
from lightning_hetpipe.server.transport.security import Security, split
from lightning_hetpipe.settings import MOST, Bounds, Choices, Duration, Length, declared, read, seconds
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
_SECURITY = [each.name for each in fields(Security)]


class WSPCallback(L.Callback):
    """Settings of the synchronisation of virtual workers; given to the Trainer as a callback, or to the strategy.

    Args:
        clock_distance: D, how many waves a virtual worker may be ahead of the slowest one; None is as the strategy's
            ``plan`` has it, and 0 without one.
        wave: W, minibatches per wave; by default as the strategy's ``plan`` has it, and Nm without one.
        shares: How virtual workers of unequal speed share the data and the length of waves: "equal", or minibatches per
            wave for each virtual worker, such as [4, 8], in proportion to which each epoch is dealt; "auto" measures
            their rates in each epoch, and has ``wave`` as the shortest wave; None is as the strategy's ``plan`` has it,
            unless ``wave`` is set, and "equal" without one.
        aggregate: "sum" adds the virtual workers' updates (the paper's rule), "mean" their mean.
        update_dtype: The dtype in which updates travel, such as "bfloat16"; by default each parameter's own. What is
            lost by it is added to the next update.
        servers: Addresses (``host:port``) of running servers; by default one is started on each machine.
        placement: Which server holds which parameter, where there are several: "size" balances their bytes,
            "round_robin" deals parameters out one by one, "local" leaves all of them to the first server, beside
            virtual worker 0: no other machine is needed then for weights to survive, but one link carries everything.
            Where virtual worker 0 has stages on several machines, "local" leaves each parameter to the server of its
            stage's machine. None is as the strategy's ``plan`` has it, and "size" without one.
        security: Certificates and token, as a ``Security`` or a mapping of its arguments; what is left out is taken
            from ``HETPIPE_*`` environment variables.
        lease: How long a virtual worker may be silent before the others go on without it.
        end_timeout: How long the first process of a machine, at its end, waits for the other virtual workers' programs
            to end, before it ends those that it has started and exits with 1; None: as long as they run.
        join_timeout: How long virtual workers wait at the start, and at the start of each fit, for those that have not
            come. After that all end, and the error says who is missing.
        restarts: How often each virtual worker whose process ends in the middle of a run is started again, at most, by
            the process that has started it. It comes back when the next epoch begins. Under ``hetpipe-train`` on one
            machine also how often the run is started again from its newest checkpoint where virtual worker 0 is lost.

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
        security: Security | Annotated[Mapping[str, Any], f"a mapping of {', '.join(_SECURITY)}"] | None = None,
        lease: Duration = timedelta(seconds=30),
        end_timeout: Duration | None = None,
        join_timeout: Duration = timedelta(minutes=10),
        restarts: Annotated[int, Bounds(0, MOST)] = 0,
    ) -> None:
        read(WSPCallback, locals())
        check_lengths(wave, shares)
        own_wave = None if wave == "auto" else wave
        planned = {"clock_distance": clock_distance, "wave": own_wave, "shares": shares, "placement": placement}
        self.settings = WSPSettings(
            clock_distance or 0,
            wave,
            tuple(shares) if shares is not None and not isinstance(shares, str) else shares or "equal",
            aggregate,
            update_dtype,
            None if servers is None else tuple(servers),
            placement or "size",
            _security(security),
            seconds(lease),
            None if end_timeout is None else seconds(end_timeout),
            seconds(join_timeout),
            restarts,
            frozenset(name for name, value in planned.items() if value is None),
        )


def _security(given: Security | Mapping[str, Any] | None) -> Security:
    if given is None or isinstance(given, Security):
        return given or Security()
    declared(Security).check(given, "security", "security")
    made = Security(**given)
    _ = made.from_environment().encrypted  # raises where files are missing
    return made
