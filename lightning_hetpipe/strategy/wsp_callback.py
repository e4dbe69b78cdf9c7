"""Wave Synchronous Parallel: how virtual workers share what they learn (HetPipe, section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any, Literal

import lightning as L

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.rules.parameter_placement import PLACEMENTS
from lightning_hetpipe.server.transport.security import Security, split
from lightning_hetpipe.strategy.checks import one_of, seconds, switch, whole

AGGREGATES = ("sum", "mean")
DTYPES = ("bfloat16", "float16", "float32")


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
        clock_distance: int | None = None,
        wave: int | Literal["auto"] = "auto",
        shares: Sequence[int] | Literal["equal", "auto"] | None = None,
        aggregate: str = "sum",
        update_dtype: str | None = None,
        servers: Sequence[str] | None = None,
        placement: str | None = None,
        security: Security | Mapping[str, Any] | None = None,
        lease: timedelta | float = timedelta(seconds=30),
        end_timeout: timedelta | float | None = None,
        join_timeout: timedelta | float = timedelta(minutes=10),
        restarts: int = 0,
    ) -> None:
        if servers is not None and (not isinstance(servers, Sequence) or isinstance(servers, str) or not servers):
            raise SettingError(f"servers={servers!r} must be a list of addresses, such as ['10.0.0.1:5000'], or None")
        named = tuple(servers or ())
        for number, address in enumerate(named):
            check_address(f"servers[{number}]", address)
            if address in named[:number]:
                raise SettingError(f"servers={[*named]!r} holds {address!r} twice; name each server once")
        own_wave = None if wave == "auto" else wave
        planned = {"clock_distance": clock_distance, "wave": own_wave, "shares": shares, "placement": placement}
        self.settings = WSPSettings(
            0 if clock_distance is None else whole("clock_distance", clock_distance, least=0),
            "auto" if wave == "auto" else whole("wave", wave, other=", or 'auto'"),
            _shares(shares, wave),
            one_of("aggregate", aggregate, AGGREGATES),
            None if update_dtype is None else one_of("update_dtype", update_dtype, DTYPES),
            None if servers is None else named,
            "size" if placement is None else one_of("placement", placement, PLACEMENTS),
            _security(security),
            seconds("lease", lease),
            None if end_timeout is None else seconds("end_timeout", end_timeout),
            seconds("join_timeout", join_timeout),
            whole("restarts", restarts, least=0),
            frozenset(name for name, value in planned.items() if value is None),
        )


def _shares(given: Any, wave: Any) -> tuple[int, ...] | Literal["equal", "auto"]:
    if given in (None, "equal", "auto"):
        return given or "equal"
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise SettingError(
            f"shares={given!r} must be 'equal', 'auto', or the minibatches in a wave of each virtual worker, such as"
            " [4, 8]"
        )
    if wave != "auto":
        raise SettingError(
            f"wave={wave!r} and shares={list(given)!r} both say how many minibatches a wave has; leave wave out"
        )
    return tuple(whole(f"shares[{vw}]", length) for vw, length in enumerate(given))


def _security(given: Security | Mapping[str, Any] | None) -> Security:
    if given is None or isinstance(given, Security):
        return given or Security()
    known = [each.name for each in fields(Security)]
    if not isinstance(given, Mapping) or (unknown := [name for name in given if name not in known]):
        what = (
            f"security[{unknown[0]!r}] is not known"
            if isinstance(given, Mapping)
            else f"security={given!r} is no mapping"
        )
        raise SettingError(f"{what}; give a mapping of {', '.join(known)}")
    made = Security(**given)
    for name, value in given.items():
        if name == "insecure":
            switch("security['insecure']", value)
        elif value is not None and not isinstance(value, str):
            shown = "" if name == "token" else f"={value!r}"
            raise SettingError(f"security[{name!r}]{shown} must be a text, or None")
    _ = made.from_environment().encrypted  # raises where files are missing
    return made


def check_address(setting: str, address: Any) -> None:
    """Refuse what is no address of a server.

    Raises:
        SettingError: which names the setting.
    """
    try:
        port = split(address if isinstance(address, str) else "")[1]
    except SettingError:
        port = 0
    if not port:
        raise SettingError(
            f"{setting}={address!r} is not host:port with a port from 1 to 65535, such as '10.0.0.1:5000'"
        )
