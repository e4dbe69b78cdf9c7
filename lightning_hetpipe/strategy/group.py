"""The virtual workers of a launch, as one of them sees the others: through servers, and never through a process group.

They gather in a *room* on the servers, from the first run of a Trainer to the program's end, as long as ddp's process
group lasts: user code may gather between runs, too. A fit has one more, in which they share weights. While that is
open, gathers go through it, as it knows who waits at which cut (law L6).
"""

from __future__ import annotations

import atexit
import importlib.metadata
import io
import itertools
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.client import Cancelled, Client, ServersSilent
from lightning_hetpipe.server.grpc_transport import GrpcChannel
from lightning_hetpipe.server.messages import Parameter, Signature
from lightning_hetpipe.server.placement import place
from lightning_hetpipe.server.protocol import COORDINATOR, PeerFailed, Refusal, RemoteFault
from lightning_hetpipe.server.rooms import RoomChannel
from lightning_hetpipe.server.transport import STATUS, Refused, Unreachable
from lightning_hetpipe.strategy.children import say
from lightning_hetpipe.strategy.pieces import gather_in_pieces
from lightning_hetpipe.strategy.servers import Found
from lightning_hetpipe.strategy.wsp import WSPSettings

ROOMS = "HETPIPE_ROOMS"
"""Environment variable that tells a child of our launcher how many rooms there were before it was started."""

_entered: dict[str, int] = {"talk": 0, "fit": 0, **json.loads(os.environ.get(ROOMS, "{}"))}
"""Rooms so far. All processes of a launch run the same program, and so count alike."""


def rooms_so_far() -> dict[str, str]:
    """For the environment of processes that take part from now on."""
    return {ROOMS: json.dumps(_entered)}


def _next_room(kind: str) -> str:
    _entered[kind] += 1
    return f"{kind}-{_entered[kind]}"


LEASES_TO_END = 2.0
"""Leases after which a launch that was killed is forgotten, and its servers serve the next one."""

_AGAIN = 0.5  # seconds between attempts to have a server that another launch has
_LAUNCH = "launch"

UNTIL_SAID = 15.0
"""Seconds of a wait for other processes after which a person is told of it."""


class _Occupied(Exception):
    """Another launch has the servers."""


class Group:
    """Virtual worker ``index`` among ``size``.

    Args:
        found: What this one knows of the servers.
        settings: Of the synchronisation.
        timeout: Seconds for which servers may be silent.
        lost: As for a `Client`.
    """

    def __init__(
        self,
        index: int,
        size: int,
        found: Found,
        settings: WSPSettings,
        timeout: float,
        lost: Callable[[], Exception | None] = lambda: None,
    ) -> None:
        self.index = index
        self.size = size
        self.settings = settings
        self._found = found
        self._timeout = timeout
        self._lost = lost
        self.interrupted: Callable[[], bool] = lambda: False
        """Whether this virtual worker is ending on an exception: what it then asks of all is answered by it alone, as
        the others do not come."""
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """Opened around waits for the others' parts of a gather."""
        self._exits = ExitStack()
        self._talk: Client | None = None
        self._fit: Client | None = None
        self._ordinal = itertools.count(1)
        self._fit_ordinal = itertools.count(1)
        self._channels: list[GrpcChannel] = []
        self._servers_lease: float | None = None
        self._failed = False
        self._gone: Mapping[int, str] = {}
        self._entering: Client | None = None

    @property
    def coordinator(self) -> str:
        """Its address."""
        return self._found.coordinator

    @property
    def is_open(self) -> bool:
        return self._talk is not None

    def open(self) -> None:
        """Enters the room of the launch; waits until all virtual workers have. At exit it is left, if not before."""
        atexit.register(self.part)
        coordinator, room = self._connect(self._found.coordinator), _next_room("talk")
        self._exits.callback(self._wait_until_all_have_left, coordinator, room)
        until = time.monotonic() + LEASES_TO_END * self.settings.lease
        try:
            with self._told_what_it_waits_for():
                while not self._has_entered(room, until):
                    time.sleep(_AGAIN)
        except ServersSilent as silent:
            raise ServersSilent(
                f"{silent}; is the program running that starts the server at {self._found.coordinator}, and may this"
                " machine reach it?"
            ) from None
        self._servers_lease = self._told_lease()
        self._check_lease()
        known = [address for each in self.gather(list(self._found.known), "the list of servers") for address in each]
        for address in known[1:]:
            self._connect(address)

    def _told_lease(self) -> float | None:
        try:
            status = json.loads(self._channels[COORDINATOR].call(STATUS, b"", timeout=self.settings.lease))
        except Unreachable:
            return None  # for a moment, perhaps; whoever calls next sees to it
        return float(status["lease"])

    def _check_lease(self) -> None:
        """Heartbeats go out by our lease, and the server misses them by its own."""
        told = self._servers_lease
        if told is not None and told != self.settings.lease:
            raise SettingError(
                f"lease={self.settings.lease:g}, but the server at {self.coordinator} has lease={told:g}; give both the"
                " same, and a program's later Trainers that of its first"
            )

    def _has_entered(self, room: str, until: float) -> bool:
        """False: not yet, as another launch has the servers, perhaps one that was killed.

        Raises:
            SettingError: if it still has them at ``until``.
        """
        self._talk = self._exits.enter_context(self._client(room, (), [f"{_LAUNCH}={self._found.launch}"]))
        try:
            self._join(self._talk, [])
        except _Occupied:
            self._talk.close()  # without a word: the other launch would take it for its own virtual worker's
            self._talk = None
            if time.monotonic() > until:
                raise SettingError(
                    f"the server at {self._found.coordinator} serves another launch; wait until that has ended, or"
                    " start servers for this one (all processes of a launch have the same MASTER_ADDR and MASTER_PORT)"
                ) from None
            return False
        return True

    def enter_fit(self, named: Sequence[tuple[str, Tensor]], settings: Sequence[str]) -> list[Tensor]:
        """Enters the room of a fit with its weights; returns w_0, which are those of VW 0.

        Args:
            named: The parameters, by name.
            settings: What else must be the same on all, as "name=value".
        """
        update_dtype = self.settings.update_dtype
        parameters = tuple(
            Parameter(name, tuple(tensor.shape), _name(tensor.dtype), update_dtype or _name(tensor.dtype))
            for name, tensor in named
        )
        self._check_lease()
        self._fit = self._client(_next_room("fit"), parameters, settings).__enter__()
        self._fit_ordinal = itertools.count(1)
        return self._join(self._fit, [tensor.detach() for _, tensor in named])

    def lose(self, gone: Mapping[int, str]) -> None:
        """From any thread: these virtual workers have ended, and how. Whoever waits for all to enter a room fails.

        The others go on without them in a room that all have entered, once their lease has run out.
        """
        self._gone = dict(gone)
        entering = self._entering
        if self._gone and entering is not None:
            entering.cancel()

    def _join(self, client: Client, weights: Sequence[Tensor]) -> list[Tensor]:
        self._entering = client
        try:
            if self._gone:
                raise Cancelled
            return _join(client, weights)
        except Cancelled:
            if not self._gone:
                raise
            who = ", ".join(f"VW {vw}, whose process {how}" for vw, how in sorted(self._gone.items()))
            raise PeerFailed(f"VW {self.index} cannot go on without {who}") from None
        finally:
            self._entering = None

    @property
    def weights(self) -> Client:
        """The membership of the fit that runs."""
        assert self._fit is not None
        return self._fit

    def gather(self, value: Any, what: str) -> list[Any]:
        """What every virtual worker that takes part gives here, in their order; at least one's own.

        Args:
            value: Tensors, numbers, strings, None, and lists, tuples and dicts of them, of any size.
            what: Names the call; where others have made another one, nobody's values belong together.

        Raises:
            RuntimeError: if they have.
            SettingError: if somebody's value cannot travel between processes.
        """
        if self._talk is None or self.interrupted():
            return [value]
        client, ordinal = (self._talk, self._ordinal) if self._fit is None else (self._fit, self._fit_ordinal)
        buffer = io.BytesIO()
        torch.save((what, value), buffer)
        with self.waiting():
            found = gather_in_pieces(buffer.getbuffer(), lambda piece: client.gather(next(ordinal), piece))
        parts = {index: _loaded(part, index) for index, part in sorted(found.items())}
        if others := [index for index, (theirs, _) in parts.items() if theirs != what]:
            raise RuntimeError(
                f"virtual worker {self.index} called {what}, while virtual worker {others[0]} called"
                f" {parts[others[0]][0]}: such a call has to be made by all of them, in the same order; look for one"
                " that only some make, such as below `if trainer.is_global_zero:`"
            )
        return [theirs for _, theirs in parts.values()]

    def passed_cut(self) -> None:
        """All have come to a cut: gathers count from one again."""
        self._fit_ordinal = itertools.count(1)

    def leave_fit(self) -> None:
        """A run is over. If it was a fit, gathers go on in the launch's room.

        If servers die, they are rebuilt from what the virtual workers hold. Who has left holds nothing: so nobody does
        before all have what the last gather and the last cut gave.
        """
        self.gather(None, "the end of a run")
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.__exit__(None, None, None)

    def close(self, failure: str = "") -> None:
        """Leaves, once all are about to; with a ``failure`` the others are told, and end."""
        try:
            if not failure:
                self.leave_fit()
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.part(failure)

    def part(self, failure: str = "") -> None:
        """Leaves at once; with a ``failure``, such as one that ends the program, the others are told, and end."""
        atexit.unregister(self.part)
        ending = getattr(sys, "last_value", None)  # what nobody has caught
        failure = failure or (f"{type(ending).__name__}: {ending}" if ending is not None else "")
        self._failed = bool(failure)
        fit, talk, self._fit, self._talk = self._fit, self._talk, None, None
        for client in (fit, talk):
            if client is not None and failure:
                client.fail(failure)
        if fit is not None:
            fit.__exit__(None, None, None)
        self._exits.close()

    def check(self) -> None:
        """Raises what has become known of the others: that one of them has failed."""
        for client in (self._fit, self._talk):
            if client is not None:
                client.check()

    def _connect(self, address: str) -> GrpcChannel:
        channel = GrpcChannel(address, self._found.security)
        self._exits.callback(channel.close)
        self._channels.append(channel)
        return channel

    @contextmanager
    def _told_what_it_waits_for(self) -> Iterator[None]:
        """Within it a person at the terminal learns after a while why nothing happens."""

        def tell() -> None:
            missing = self._talk.waits_for if self._talk is not None else ""
            what = f"for {missing}" if missing else f"until all {self.size} have come"
            say(f"virtual worker {self.index} waits {what} (at the server {self._found.coordinator})")

        timer = threading.Timer(UNTIL_SAID, tell)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _wait_until_all_have_left(self, coordinator: GrpcChannel, room: str) -> None:
        """A server that ends with this process must outlast the others' last calls, and tell them of a failure."""
        if not self._found.hosts:
            return
        began, told, again = time.monotonic(), False, threading.Event()
        while True:
            try:
                status = json.loads(coordinator.call(STATUS, b"", timeout=self.settings.lease))
            except (Unreachable, Refused):
                return  # it has ended, and only ends when all have left
            members = status.get(room, {}).get("members", ())
            left = [str(member["vw"]) for member in members if member["vw"] != self.index]
            waited = time.monotonic() - began
            if not left or (self._failed and waited > self.settings.lease):
                return
            if waited > UNTIL_SAID and not told:
                told = True
                say(f"virtual worker {self.index} has ended, and its server waits for {', '.join(left)} to end")
            again.wait(0.1)

    def _client(self, room: str, parameters: tuple[Parameter, ...], settings: Sequence[str]) -> Client:
        wsp = self.settings
        placed = place(parameters, len(self._channels), wsp.placement)
        # A server that has nothing to keep is not asked for anything: it may be lost.
        used = [server for server, indices in enumerate(placed) if indices or server == COORDINATOR]
        signature = Signature(
            importlib.metadata.version("lightning_hetpipe"),
            self.size,
            wsp.clock_distance,
            wsp.aggregate,
            len(used),
            tuple(settings),
            parameters,
        )
        return Client(
            [RoomChannel(self._channels[server], room) for server in used],
            signature,
            [placed[server] for server in used],
            self.index,
            time.time_ns(),
            lease=wsp.lease,
            timeout=self._timeout,
            name=f"hetpipe-{room}",
            lost=self._lost,
        )


def _join(client: Client, weights: Sequence[Tensor]) -> list[Tensor]:
    try:
        return client.join(weights)
    except RemoteFault as error:
        if error.refusal is Refusal.SIGNATURE and f"'{_LAUNCH}=" in str(error):
            raise _Occupied from None
        way_out = "; give all of them the same model and settings" if error.refusal is Refusal.SIGNATURE else ""
        raise SettingError(f"this virtual worker was refused: {error}{way_out}") from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _loaded(part: bytes, index: int) -> tuple[str, Any]:
    try:
        loaded: tuple[str, Any] = torch.load(io.BytesIO(part), weights_only=True)
    except pickle.UnpicklingError:
        raise SettingError(
            f"virtual worker {index} gave the others something that does not travel between processes, which only"
            " tensors, numbers, strings, None, and lists, tuples and dicts of them do; make such a thing of it"
        ) from None
    return loaded
