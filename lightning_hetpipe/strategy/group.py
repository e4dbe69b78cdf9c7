"""The virtual workers of a launch, as one of them sees the others: through servers, and never through a process group.

Every run of a Trainer has a *room* on the servers, in which virtual workers gather; a fit has one more, in which they
share weights. While a fit's room is open, gathers go through that one, as it knows who waits at which cut (law L6).
"""

from __future__ import annotations

import importlib.metadata
import io
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.client import Cancelled, Client, ServersSilent
from lightning_hetpipe.server.grpc_transport import GrpcChannel
from lightning_hetpipe.server.messages import Parameter, Signature
from lightning_hetpipe.server.placement import place
from lightning_hetpipe.server.protocol import COORDINATOR, PeerFailed, Refusal, RemoteFault
from lightning_hetpipe.server.rooms import STATUS, RoomChannel
from lightning_hetpipe.server.transport import Refused, Unreachable
from lightning_hetpipe.strategy.children import say
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


UNTIL_SAID = 15.0
"""Seconds of a wait for other processes after which a person is told of it."""


class Group:
    """Virtual worker ``index`` among ``size``.

    Args:
        found: What this one knows of the servers.
        settings: Of the synchronisation.
        timeout: Seconds for which servers may be silent.
        lost: As for a `Client`.
        interrupted: Whether this virtual worker is ending on an exception: what it then asks of all is answered by it
            alone, as the others do not come.
    """

    def __init__(
        self,
        index: int,
        size: int,
        found: Found,
        settings: WSPSettings,
        timeout: float,
        lost: Callable[[], Exception | None] = lambda: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.index = index
        self.size = size
        self.settings = settings
        self._found = found
        self._timeout = timeout
        self._lost = lost
        self._interrupted = interrupted
        self._exits = ExitStack()
        self._talk: Client | None = None
        self._fit: Client | None = None
        self._ordinal = itertools.count(1)
        self._fit_ordinal = itertools.count(1)
        self._channels: list[GrpcChannel] = []
        self._failed = False
        self._gone: Mapping[int, str] = {}
        self._entering: Client | None = None

    def open(self) -> None:
        """Enters the room of this run; waits until all virtual workers have."""
        coordinator, room = self._connect(self._found.coordinator), _next_room("talk")
        self._exits.callback(self._wait_until_all_have_left, coordinator, room)
        self._talk = self._client(room, (), ())
        try:
            with self._told_what_it_waits_for():
                self._join(self._talk, [])
        except ServersSilent as silent:
            raise ServersSilent(
                f"{silent}; is the program running that starts the server at {self._found.coordinator}, and may this"
                " machine reach it?"
            ) from None
        known = [address for each in self.gather(list(self._found.known)) for address in each]
        for address in known[1:]:
            self._connect(address)

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
        self._fit = self._client(_next_room("fit"), parameters, settings)
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

    def gather(self, value: Any) -> list[Any]:
        """What every virtual worker that takes part gives here, in their order; at least one's own.

        Values are tensors, numbers, strings, None, and lists, tuples and dicts of them.
        """
        if self._talk is None or self._interrupted():
            return [value]
        buffer = io.BytesIO()
        torch.save(value, buffer)
        if self._fit is not None:
            found = self._fit.gather(next(self._fit_ordinal), buffer.getvalue())
        else:
            found = self._talk.gather(next(self._ordinal), buffer.getvalue())
        return [_loaded(found[index]) for index in sorted(found)]

    def passed_cut(self) -> None:
        """All have come to a cut: gathers count from one again."""
        self._fit_ordinal = itertools.count(1)

    def close(self, failure: str = "") -> None:
        """Leaves, once all are about to; with a ``failure`` the others are told, and end.

        If servers die, they are rebuilt from what the virtual workers hold. Who has left holds nothing: so nobody does
        before all have what the last gather and the last cut gave.
        """
        self._failed = bool(failure)
        try:
            if not failure:
                self.gather(None)
        except BaseException as error:
            failure, self._failed = f"{type(error).__name__}: {error}", True
            raise
        finally:
            for client in (self._fit, self._talk):
                if client is not None and failure:
                    client.fail(failure)
            self._fit = self._talk = None
            self._exits.close()

    def check(self) -> None:
        """Raises what has become known of the others: that one of them has failed."""
        for client in (self._fit, self._talk):
            if client is not None:
                client.check()

    def cancel(self) -> None:
        """Ends waits for the others, from another thread."""
        for client in (self._fit, self._talk):
            if client is not None:
                client.cancel()

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
        client = Client(
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
        return self._exits.enter_context(client)


def _join(client: Client, weights: Sequence[Tensor]) -> list[Tensor]:
    try:
        return client.join(weights)
    except RemoteFault as error:
        way_out = "; give all of them the same model and settings" if error.refusal is Refusal.SIGNATURE else ""
        raise SettingError(f"this virtual worker was refused: {error}{way_out}") from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _loaded(part: bytes) -> Any:
    return torch.load(io.BytesIO(part), weights_only=True)
