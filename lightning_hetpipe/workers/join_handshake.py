"""Join handshake: a virtual worker joins a session with its launch, and keeps apart from other launches.

Servers that people started may serve several launches, one at a time. A launch waits for the end of another launch
there, and is refused if that takes long. A server that is not the coordinator gets only calls with weights, which
another launch's weights would replace. So before a fit, each launch with an id makes itself *present* on every server
that gets weights: it joins a session with one name for all launches there.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.errors import SettingError, notice_if_long
from lightning_hetpipe.launch.parent_watch import this_child
from lightning_hetpipe.launch.servers import FoundServers, LaunchSettings
from lightning_hetpipe.server.process.client import Client, NotJoined
from lightning_hetpipe.server.process.sessions import COORDINATOR_METHOD, SessionChannel
from lightning_hetpipe.server.process.waits import LONGEST_WAIT, Cancelled, ServersUnheard
from lightning_hetpipe.server.protocol.identifiers import COORDINATOR, PeerFailed, Refusal, RemoteFault
from lightning_hetpipe.server.protocol.messages import Departed, Leave, Lost, Parameter, TrainingSignature, encode
from lightning_hetpipe.server.protocol.shard import place
from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.interface import RELEASE, STATUS, CallRefused, Unreachable
from lightning_hetpipe.server.transport.security import split

LEASES_TO_END = 2.0
"""Number of leases after which a killed launch is forgotten, and its servers serve the next launch."""

LEASES_FOR_A_SEAT = 3.0
"""Number of leases after which a returning process gives up to be a member from the next epoch on."""

_AGAIN = 0.5  # seconds between attempts to have a server that another launch has
_LOOK = 0.1  # seconds between looks at a process that is perhaps alive
_LAUNCH = "launch"
_PRESENCE = "launch-1"


class _Occupied(Exception):
    """Error that the servers serve another launch."""


@dataclass(eq=False)
class JoinHandshake:
    """Handshake of virtual worker ``index`` among ``size``.

    Args:
        launch: Settings of the launch, which may be set anew. Servers may be silent for its timeout.
        lost, departed, updates_lost: As for a `Client`. The second argument of ``departed`` is True for a session with
            weights. Only a session with weights has updates.
    """

    launch: LaunchSettings
    found: FoundServers
    lost: Callable[[], Exception | None]
    departed: Callable[[Departed, bool], None]
    updates_lost: Callable[[Lost], None]

    def __post_init__(self) -> None:
        self.index, self.size = self.launch.rank.index, self.launch.rank.size
        self.least = self.launch.rank.least
        """Number of virtual workers with which a session begins, or 0 for all. It may be set anew."""
        self._channels: list[GrpcChannel] = []
        self._hearts: list[GrpcChannel] = []
        """Connections to the servers for heartbeats alone."""
        self._present: dict[int, Client] = {}
        """Presence of the launch, by server."""
        self._gone: Mapping[int, str] = {}
        self._joining: Client | None = None
        self._incarnation = 0
        """Incarnation of this process, in the sessions of the launch and of fits."""
        self._came_late = False
        """True if the other virtual workers had joined the launch before this process, and are present."""
        self.returns = False
        """True while this process comes to sessions that the other virtual workers have joined."""
        self.is_new = False
        """True if no earlier process had its number."""

    @property
    def coordinator(self) -> GrpcChannel:
        return self._channels[COORDINATOR]

    @property
    def _launch_setting(self) -> str:
        """Setting by which launches differ."""
        return f"{_LAUNCH}={self.found.launch}"

    @property
    def longest_wait(self) -> float:
        """Seconds to wait for live virtual workers. They are many, because user code may take long."""
        return max(LONGEST_WAIT, self.launch.timeout)

    def server_on(self, machine: str) -> int:
        """Return the number of the server on ``machine``, the host of its address, or the coordinator's."""
        machines = [split(channel.address)[0] for channel in self._channels]
        return machines.index(machine) if machine in machines else COORDINATOR

    def connect(self, servers: Sequence[str]) -> None:
        """Connect to new ones of these servers, the coordinator's first. Earlier connections stay."""
        for address in servers[len(self._channels) :]:
            self._channels.append(GrpcChannel(address, self.found.security))
            self._hearts.append(GrpcChannel(address, self.found.security))

    def join(
        self,
        session: str,
        named: Sequence[tuple[str, Tensor]] = (),
        settings: Sequence[str] = (),
        servers: Sequence[int] | None = None,
        homes: Sequence[int] = (),
    ) -> tuple[Client, list[Tensor]]:
        """Join a session when all virtual workers do and no other launch is there. Return the client and VW 0's
        weights.

        Args:
            named: Parameters by name.
            settings: Settings that must be equal on all virtual workers, as "name=value".
            servers: Servers of the session, by default the servers that get parameters.
            homes: Server beside each parameter's stage, for ``placement="local"``. By default the coordinator.

        Raises:
            SettingError: if this virtual worker differs from the other virtual workers, or another launch keeps the
                servers.
            RemoteFault: if the run has gone on without this virtual worker meanwhile.
            PeerFailed: if other virtual workers have ended.
            NotJoined: if some do not come within ``join_timeout``. All virtual workers end.
        """
        wsp = self.launch.wsp
        parameters = tuple(
            Parameter(name, tuple(tensor.shape), _name(tensor.dtype), wsp.update_dtype or _name(tensor.dtype))
            for name, tensor in named
        )
        placed = place(parameters, len(self._channels), wsp.placement, homes)
        # A server without parameters gets no calls, because it may be lost.
        used = servers or [server for server, its in enumerate(placed) if its or server == COORDINATOR]
        if self.found.launch and parameters and not self._came_late:
            for server in used:
                if server not in self._present:
                    self._present[server] = self.join(_PRESENCE, servers=[server])[0]
        signature = TrainingSignature(
            version=RELEASE,
            virtual_workers=self.size,
            clock_distance=wsp.clock_distance,
            aggregate=wsp.aggregate,
            servers=len(used),
            settings=(self._launch_setting, *settings),
            parameters=parameters,
            least=self.least,
        )
        weights = [tensor.detach() for _, tensor in named]
        until, again = time.monotonic() + LEASES_TO_END * wsp.lease, threading.Event()
        while True:
            incarnation = self._incarnation if parameters else self._new_incarnation(session, self._channels[used[0]])
            client = Client(
                [SessionChannel(self._channels[server], session, self._channels[server].address) for server in used],
                signature,
                [placed[server] for server in used],
                self.index,
                incarnation,
                lease=wsp.lease,
                timeout=self.launch.timeout,
                # It asks for a seat when the others have left their state for it. They wait for a lease, and go on.
                longest_wait=LEASES_FOR_A_SEAT * wsp.lease if self.returns and parameters else self.longest_wait,
                join_timeout=wsp.join_timeout,
                name=f"hetpipe-{session}",
                lost=self.lost,
                heart=SessionChannel(self._hearts[used[0]], session),
                departed=lambda each: self.departed(each, bool(parameters)),
                updates_lost=lambda each: self.updates_lost(each) if parameters else None,
            )
            client.__enter__()
            try:
                return client, self._join_with(client, weights)
            except _Occupied:
                client.close()  # without a message, which the other launch would take for its own virtual worker's
                if time.monotonic() > until:
                    which = " and ".join(self._channels[server].address for server in used)
                    raise SettingError(
                        f"the server at {which} serves another launch; wait until that has ended, or start servers for"
                        " this one (all processes of a launch have the same MASTER_ADDR and MASTER_PORT)"
                    ) from None
            except BaseException:
                client.__exit__(*sys.exc_info())
                raise
            again.wait(_AGAIN)

    def lose(self, gone: Mapping[int, str]) -> None:
        """Record, from any thread, how virtual workers have ended. From now on joining a session, which needs all,
        fails. A session that all have joined goes on without them after their lease."""
        self._gone = {**self._gone, **gone}
        if self._is_incomplete and (joining := self._joining) is not None:
            joining.cancel()

    def find(self, vws: Sequence[int]) -> None:
        """Record that ``vws`` are there again."""
        self._gone = {vw: how for vw, how in self._gone.items() if vw not in vws}

    def come_to(self, session: str) -> Client:
        """Join the session of the launch, when all virtual workers do or later. Raise as :meth:`join` does. ``returns``
        is True if it came later. Then it waits for the first epoch, because until then all gathers would wait for its
        part."""
        with self._explaining_waits():
            # Our launcher knows when its children have ended.
            if this_child() is None and self._is_taken(session):
                raise SettingError(
                    f"virtual worker {self.index} takes part already, in another process that lives; give this one the"
                    " number of another (LOCAL_RANK, NODE_RANK, RANK), or end that one first"
                )
            client, _ = self.join(session)
            self._incarnation = client.member.incarnation
            self.returns = self._came_late = client.member.came_late
            if self.returns:
                self._end_former()
            return client

    def status_of(self, session: str) -> dict[str, Any]:
        """Return the coordinator's status of ``session``, or an empty dict if it does not answer or does not know
        it."""
        found: dict[str, Any] = self._statuses(self.coordinator).get(session, {})
        return found

    def _statuses(self, channel: GrpcChannel) -> dict[str, Any]:
        """Return the status of a server with the status of each session, or an empty dict if it does not answer."""
        try:
            found: dict[str, Any] = json.loads(channel.call(STATUS, b"", timeout=self.launch.wsp.lease))
        except (Unreachable, CallRefused):
            return {}
        return found

    def _is_taken(self, session: str) -> bool:
        """Return True if another process of this virtual worker lives in ``session``, in this launch. A live process is
        heard three times in a lease, so wait half a lease for it."""
        began, again = time.monotonic(), threading.Event()
        while time.monotonic() < began + self.launch.wsp.lease / 2:
            status = self.status_of(session)
            member = next((member for member in status.get("members", ()) if member["vw"] == self.index), None)
            if member is None or status["phase"] != "running" or self._launch_setting not in status["settings"]:
                return False
            if member["silent_ms"] < 1000 * (time.monotonic() - began):
                return True
            again.wait(_LOOK)
        return False

    def _end_former(self) -> None:
        """Let an earlier process of this virtual worker leave all fits, so that no virtual worker waits for its
        lease."""
        for name, status in self._statuses(self.coordinator).items():
            members = status["members"] if name.startswith("fit-") else ()
            for incarnation in (member["incarnation"] for member in members if member["vw"] == self.index):
                leave = encode(Leave(self.index, incarnation, "", "started again"))
                with suppress(Unreachable, CallRefused):  # then its lease runs out
                    SessionChannel(self.coordinator, name).call(
                        COORDINATOR_METHOD, leave, timeout=self.launch.wsp.lease
                    )

    @property
    def _is_incomplete(self) -> bool:
        """True if a session cannot begin because virtual workers are gone. This process may come back to a running
        session."""
        return bool(self._gone) and not self.returns

    def check_lease(self) -> None:
        """Raise SettingError if the coordinator's lease differs. Heartbeats follow our lease, and servers miss them by
        their own."""
        theirs = self._statuses(self.coordinator).get("lease")  # None if it is unreachable, which the next call raises
        if theirs is not None and theirs != self.launch.wsp.lease:
            raise SettingError(
                f"lease={self.launch.wsp.lease:g}, but the server at {self.found.coordinator} has lease={theirs:g};"
                " give both the same, and a program's later Trainers that of its first"
            )

    def close(self) -> None:
        """End the presence of the launch, and all connections."""
        present, self._present = self._present, {}
        for client in present.values():
            client.__exit__(None, None, None)
        channels, self._channels, self._hearts = [*self._channels, *self._hearts], [], []
        for channel in channels:
            channel.close()

    @contextmanager
    def _explaining_waits(self) -> Iterator[None]:
        """Context manager. If joining takes long, print which virtual workers are missing. Without an answer, raise
        SettingError for a server that people started, and ServersUnheard for a server of the launch."""

        def waits() -> str:
            joining = self._joining
            missing = joining.waits_for if joining is not None else ""
            enough = f"{self.least} of {self.size}" if 0 < self.least < self.size else f"all {self.size}"
            what = f"for {missing}" if missing else f"until {enough} have come"
            return f"virtual worker {self.index} waits {what} (at the server {self.found.coordinator})"

        try:
            with notice_if_long(waits):
                yield
        except ServersUnheard as silent:
            if self.launch.wsp.servers is not None:
                raise SettingError(
                    f"servers={list(self.launch.wsp.servers)!r} does not answer ({silent}); start it, with"
                    " hetpipe-server address=..., or give the address of one that runs and that this machine may reach"
                ) from None
            raise ServersUnheard(
                f"{silent}; is the program running that starts the server at {self.found.coordinator}, and may this"
                " machine reach it?"
            ) from None

    def _new_incarnation(self, session: str, channel: GrpcChannel) -> int:
        """Return an incarnation larger than each earlier process's, even if its machine's clock was ahead."""
        status = self._statuses(channel) if self.index else {}
        known: int = status.get(session, {}).get("incarnations", {}).get(str(self.index), -1)
        self.is_new = known < 0
        return max(time.time_ns(), known + 1)

    def _join_with(self, client: Client, weights: Sequence[Tensor]) -> list[Tensor]:
        self._joining = client
        try:
            if self._is_incomplete:
                raise Cancelled
            return client.join(weights)
        except Cancelled:
            if not self._is_incomplete:
                raise
            who = ", ".join(f"VW {vw}, which {how}" for vw, how in sorted(self._gone.items()))
            raise PeerFailed(f"VW {self.index} cannot go on without {who}") from None
        except NotJoined as late:
            who = ", ".join(f"VW {vw}{self.found.place_of(vw)}" for vw in late.missing)
            few = self.least - (self.size - len(late.missing))
            who = f"{few} of {who}" if self.least and few < len(late.missing) else who
            raise NotJoined(
                f"VW {self.index} has waited {self.launch.wsp.join_timeout:g} s for {who} to join; look at what"
                " happened to each of them, or, where they may take so long to start, give all virtual workers a longer"
                " WSPCallback(join_timeout=...)",
                late.missing,
            ) from None
        except RemoteFault as error:
            if error.refusal is Refusal.SIGNATURE and f"'{_LAUNCH}=" in str(error):
                raise _Occupied from None
            if error.refusal is Refusal.LEFT_OUT:  # because it was silent for too long, and may come again
                raise
            way_out = "; give all of them the same model and settings" if error.refusal is Refusal.SIGNATURE else ""
            raise SettingError(f"this virtual worker was refused: {error}{way_out}") from None
        finally:
            self._joining = None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
