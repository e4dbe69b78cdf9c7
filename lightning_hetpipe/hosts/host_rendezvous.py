"""Meeting of the nodes of a launch, some of which serve stages of virtual workers with leaders on other nodes.

node 0             listens; records where each node serves, tells everybody, and says in the end how it has ended
other processes    say what their node serves, and learn what all others do; a node without a leader then serves
                   until node 0 has ended
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from typing import Any, Self

from lightning_hetpipe.errors import SettingError, notice_if_long, say
from lightning_hetpipe.hosts.secured_socket import (
    INTRODUCING,
    Connection,
    Door,
    Refused,
    admit,
    connect,
    hear,
    listen,
    tell,
)
from lightning_hetpipe.server.transport.security import Security, split

MOST = 1024
"""Largest number of connections at a time. Further connections are closed."""

MOST_NAMED = 8
"""Largest number of machines whose refusals are repeated in the final error."""

SAYING = 5.0
"""Seconds for telling all serving nodes how node 0 has ended."""

_AGAIN = 0.5  # seconds between attempts to connect


@dataclass(frozen=True)
class Arrival:
    """A process that has arrived, and what its node serves.

    Attributes:
        plan: Checksum of its plan.
        host, server: Addresses of the host server and the parameter server of its node, empty if this process has none.
        stays: Whether it serves until node 0 has ended.
    """

    node: int
    plan: str
    host: str = ""
    server: str = ""
    stays: bool = False


class HostRendezvous:
    """Node 0's end of the meeting, as a context manager that listens at ``address``.

    ``own`` is this process's arrival. ``expected`` has the names of the nodes that serve, by their numbers.

    Raises:
        SettingError: on entering, if the address is not available.
    """

    def __init__(self, address: str, security: Security, own: Arrival, expected: Mapping[int, str]) -> None:
        self.address = address
        self._security = security
        self._plan = own.plan
        self._expected = expected
        self._arrived = {own.node: own} if own.host else {}
        self._connections: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._status: int | None = None
        self._refusals: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._security.encrypted:
            self._security.read()
        try:
            listener = listen(*split(self.address))
        except OSError as error:
            raise SettingError(
                f"node 0 cannot listen on {self.address} ({error.strerror}), where the other nodes of the plan look for"
                " it: MASTER_ADDR must be node 0's address in the network (other nodes set NODE_RANK), and the port"
                " after that of its server (HETPIPE_PORT, or else MASTER_PORT + 1) must be free; set them so on every"
                " node"
            ) from None
        self._door = Door(listener, self._serve, MOST, "hetpipe-host-rendezvous")
        self._door.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.end(1)

    def everyone(self, seconds: float) -> list[Arrival]:
        """Wait for the expected nodes, and return the addresses at which all nodes serve.

        Raises:
            SettingError: after ``seconds``. It names the missing nodes.
        """
        with notice_if_long(lambda: f"node 0 waits for {_nodes(self._missing())} of the plan"), self._changed:
            if not self._changed.wait_for(lambda: not self._missing(), seconds):
                refused = "; ".join(f"{peer} was refused: {why}" for peer, why in self._refusals.items())
                refused = f" ({refused})" if refused else ""
                raise SettingError(
                    f"{_nodes(self._missing())} of the plan did not come within {seconds:g} s{refused};"
                    " start the program on each node of the plan, with the NODE_RANK of that node, or set"
                    " WSPCallback(join_timeout=...)"
                )
            return [self._arrived[node] for node in sorted(self._arrived)]

    def end(self, status: int) -> None:
        """Tell serving nodes that this process has ended with ``status``. Further calls do nothing."""
        with self._changed:
            if self._status is not None:
                return
            self._status = status
            self._changed.notify_all()
        self._door.close(SAYING)

    def _missing(self) -> dict[int, str]:
        return {node: name for node, name in self._expected.items() if node not in self._arrived}

    def _serve(self, raw: socket.socket, peer: str) -> None:
        def refused(shown: dict[str, Any]) -> str | None:
            self._door.heard(raw)  # now, as node 0 may end as soon as it knows of the arrival
            return self._note(Arrival(**shown.get("arrival", {})), raw)

        try:
            connection, shown = admit(raw, self._security, INTRODUCING, refused)
            raw.settimeout(INTRODUCING)
            self._tell(connection, Arrival(**shown["arrival"]))
        except (Refused, TypeError) as why:
            say(f"a node at {peer} was refused: {why}")
            with self._changed:
                if len(self._refusals) < MOST_NAMED:
                    self._refusals[peer] = str(why)
        except OSError:
            pass

    def _tell(self, connection: Connection, arrival: Arrival) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._status is not None or not self._missing())
            status, missing = self._status, self._missing()
            arrived = [asdict(self._arrived[node]) for node in sorted(self._arrived)]
        if not missing:  # also if node 0 has ended since
            tell(connection, {"arrived": arrived})
            if not arrival.stays:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._status is not None)
                status = self._status
        tell(connection, {"status": status})

    def _note(self, arrival: Arrival, raw: socket.socket) -> str | None:
        """Record ``arrival`` over the connection ``raw``, or return why the process is not let in."""
        if arrival.plan != self._plan:
            return f"its plan is another one (checksum {arrival.plan}, and {self._plan} here); give both the same file"
        if not arrival.host:
            return None
        if arrival.node not in self._expected:
            return f"NODE_RANK={arrival.node} serves no stage of the plan"
        with self._changed:
            before = self._connections.get(arrival.node)
            # An open connection sends nothing more, but its end.
            if before is not None and before.fileno() >= 0 and not wait([before], 0):
                return f"NODE_RANK={arrival.node} has come already; give each node a NODE_RANK of its own"
            self._arrived[arrival.node], self._connections[arrival.node] = arrival, raw
            self._changed.notify_all()
        return None


class Meeting:
    """The end of another process than node 0, as a context manager whose exit closes the connection.

    ``address`` is node 0's. Node 0 must answer there within ``seconds``. ``own`` is this process's arrival.

    Raises:
        SettingError: if nobody answers in time, or if node 0 does not let this process in or has another plan.
    """

    def __init__(self, address: str, security: Security, own: Arrival, seconds: float) -> None:
        self._address = address
        self._raw, self._connection = _connected(address, security, own, seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def everyone(self, seconds: float) -> list[Arrival]:
        """Wait for the expected nodes, and return the addresses at which all nodes serve.

        Raises:
            SettingError: if node 0 has ended, or takes longer than ``seconds``.
        """
        try:
            self._raw.settimeout(seconds)
            with notice_if_long(lambda: f"this node waits for others of the plan, at node 0 ({self._address})"):
                told = hear(self._connection)
        except TimeoutError:
            raise SettingError(
                f"node 0 ({self._address}) has waited for other nodes of the plan for {seconds:g} s; start the program"
                " on each of them, or set WSPCallback(join_timeout=...)"
            ) from None
        except (Refused, OSError):
            told = {"status": None}
        if "status" in told:
            raise SettingError(
                f"node 0 ({self._address}) has ended before all nodes of the plan had come; look there why"
            )
        return [Arrival(**each) for each in told["arrived"]]

    def status(self) -> int | None:
        """Wait until node 0 has ended, and return its exit code, or None if it could not send it."""
        self._raw.settimeout(None)
        try:
            found: int = hear(self._connection)["status"]
        except (Refused, OSError, KeyError):
            return None
        return found


def _connected(address: str, security: Security, own: Arrival, seconds: float) -> tuple[socket.socket, Connection]:
    """Connect to node 0, which may start later than this process."""
    until, again = time.monotonic() + seconds, threading.Event()
    with notice_if_long(lambda: f"this node waits for node 0, which does not answer at {address} yet"):
        while True:
            try:
                return connect(address, security, INTRODUCING, arrival=asdict(own))
            except Refused as refused:
                raise SettingError(f"node 0 ({address}) does not let this process in: {refused}") from None
            except OSError as error:
                if time.monotonic() > until:
                    raise SettingError(
                        f"node 0 does not answer at {address} within {seconds:g} s ({error.strerror or error}); start"
                        " the program there with NODE_RANK=0, and set MASTER_ADDR and MASTER_PORT alike on all nodes,"
                        " or set a longer timeout"
                    ) from None
            again.wait(_AGAIN)


def _nodes(missing: Mapping[int, str]) -> str:
    words = [f"{name} (NODE_RANK={node})" for node, name in missing.items()]
    return " and ".join(words)
