"""A transport within the process that calls a server's handler directly, and goes wrong where a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from lightning_hetpipe.server.process.sessions import COORDINATOR_METHOD, Service
from lightning_hetpipe.server.protocol.messages import decode
from lightning_hetpipe.server.transport.interface import CallRefused, IncomingCall, Room, SenderGone, Unreachable
from tests.server.world import Fault


@dataclass
class Host:
    """Host of a server, which can be started anew, with whatever it held gone."""

    start: Callable[[], Service]
    service: Service = field(init=False)

    def __post_init__(self) -> None:
        self.service = self.start()

    def restart(self) -> None:
        self.service = self.start()


@dataclass(frozen=True)
class Address:
    """The ``nth`` message, from 0, of this kind that goes from a VW to a server."""

    vw: int
    server: int
    kind: str
    nth: int


@dataclass
class Faults:
    """Fates of messages; ``then`` is called when one has happened, before its sender learns of it."""

    at: dict[Address, Fault] = field(default_factory=dict)
    then: dict[Address, Callable[[], None]] = field(default_factory=dict)
    happened: set[Address] = field(default_factory=set)
    _counts: dict[tuple[int, int, str], int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, vw: int, server: int, kind: str) -> Address:
        with self._lock:
            nth = self._counts.get((vw, server, kind), 0)
            self._counts[vw, server, kind] = nth + 1
            address = Address(vw, server, kind, nth)
            if address in self.at or address in self.then:
                self.happened.add(address)
            return address


def filler(data: bytes, offered: memoryview | None = None) -> Callable[[memoryview], None]:
    """Fills memory with ``data``, unless that lies there."""

    def receive(memory: memoryview) -> None:
        if memory is not offered:
            memory[:] = data

    return receive


class DirectChannel:
    """From one VW to one host."""

    def __init__(self, host: Host, vw: int, server: int, faults: Faults) -> None:
        self._host, self._vw, self._server, self._faults = host, vw, server, faults

    def call(
        self,
        method: str,
        header: bytes,
        body: Sequence[memoryview] = (),
        into: Room = (),
        timeout: float = 60.0,
    ) -> bytes:
        address = self._faults.next(self._vw, self._server, type(decode(header)).__name__)
        fault = self._faults.at.get(address, Fault.NONE)
        then = self._faults.then.get(address, lambda: None)
        service = self._host.service
        if fault is Fault.LOST_REQUEST:
            then()
            raise Unreachable("the request was lost")
        data = b"".join(body)
        # Every other VW is on the server's host.
        offered = body[0] if len(body) == 1 and self._vw % 2 == 0 else None

        sent = IncomingCall(method, header, len(data), filler(data, offered), offered)
        if fault is Fault.CUT_OFF:

            def cut_off(memory: memoryview) -> None:
                raise SenderGone

            with suppress(SenderGone):
                service.serve(replace(sent, receive=cut_off))
            then()
            raise Unreachable("half of the request was lost")
        reply = service.serve(sent)
        if fault is Fault.TWICE:
            try:
                reply = service.serve(sent)
            except CallRefused:
                if method == COORDINATOR_METHOD:  # a shard has what has come before
                    raise
        then()
        if fault is Fault.LOST_REPLY:
            raise Unreachable("the reply was lost")
        if service is not self._host.service:
            raise Unreachable("the server was started anew meanwhile")
        answer, start = b"".join(reply.body), 0
        room = into(len(answer)) if callable(into) else into
        if len(answer) != sum(map(len, room)):
            raise CallRefused(f"the reply has a body of {len(answer)} bytes, and the caller other room")
        for each in room:
            each[:] = answer[start : start + len(each)]
            start += len(each)
        return reply.header

    def close(self) -> None: ...
