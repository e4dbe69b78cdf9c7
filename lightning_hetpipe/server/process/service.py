"""Handler of one session of a server: the pure coordinator and the pure shard, each behind one lock.

A request without an answer yet waits here for a change, at most for ``longest_wait``. Then its sender has to ask again.
So a wait costs no traffic, and a lost answer costs at most one wait.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

from lightning_hetpipe.server.protocol import messages
from lightning_hetpipe.server.protocol.coordinator import Coordinator
from lightning_hetpipe.server.protocol.decisions import Note, ignore
from lightning_hetpipe.server.protocol.identifiers import Refusal, RemoteFault
from lightning_hetpipe.server.protocol.shard import Shard
from lightning_hetpipe.server.transport.interface import CallRefused, IncomingCall, Reply

COORDINATOR_METHOD = "coordinator"
SHARD_METHOD = "shard"


class Service:
    """Session of a server, with a shard. Any server can be the coordinator, and VWs use one server as coordinator.

    Args:
        lease: Seconds of silence after which a VW is left out.
        longest_wait: Seconds for which a request waits.
        gone: The `gone` of the service that this service replaces.
        note: Receives every decision of the coordinator about weights. It must not wait.
    """

    def __init__(
        self,
        lease: float,
        *,
        longest_wait: float = 2.0,
        gone: Mapping[int, int] | None = None,
        note: Note = ignore,
    ) -> None:
        epoch = secrets.token_hex(8)
        self._longest_wait = min(longest_wait, lease / 3)  # a VW that waits is not heard
        self._coordinator = Coordinator(epoch, lease, gone, note)
        self._closed = False
        self._changed = threading.Condition()
        self._shard = Shard(epoch)
        self._shard_lock = threading.Lock()

    @property
    def finished(self) -> bool:
        """True if VWs have come, and all are gone."""
        with self._changed:
            return self._coordinator.finished(time.monotonic())

    @property
    def unused(self) -> bool:
        """True if no VW has come, and no bytes are held."""
        return self.elsewhere and not self.bytes_held

    @property
    def elsewhere(self) -> bool:
        """True if no VW has come. A coordinator, if any, is then on another server."""
        with self._changed:
            return self._coordinator.unused

    @property
    def gone(self) -> Mapping[int, int]:
        """Last incarnation of each VW that is gone."""
        with self._changed:
            return dict(self._coordinator.gone)

    @property
    def bytes_held(self) -> int:
        """Bytes of weights and staged updates in host memory."""
        with self._shard_lock:
            return self._shard.bytes_held

    def status(self) -> dict[str, Any]:
        """Return phase, clocks, members and bytes as JSON values."""
        with self._changed:
            status = self._coordinator.status(time.monotonic())
        return {**status, "held_bytes": self.bytes_held}

    def close(self) -> None:
        """Wake all waiting and later requests. Their senders have to ask again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def serve(self, call: IncomingCall) -> Reply:
        message: object = None
        try:
            message = _read(call.method, call.header)
            if isinstance(message, messages.ShardRequest):
                return self._serve_shard(message, call)
            with self._changed:
                self._coordinator.check(message, call.size, time.monotonic())
            body = memoryview(bytearray(call.size))
            call.receive(body)
            return self._run_coordinator(message, body)
        except RemoteFault as fault:
            # Do not log a VW that its own launch has ended meanwhile, for example by Ctrl-C.
            silent = (Refusal.STALE, Refusal.FAILED, Refusal.LEFT_OUT)
            cannot_join = isinstance(message, messages.Join) and fault.refusal not in silent
            raise CallRefused(fault.text, turned_away=str(fault) if cannot_join else "") from fault

    def _serve_shard(self, message: messages.ShardRequest, call: IncomingCall) -> Reply:
        with self._shard_lock:
            body = self._shard.open(message, call.size, call.offered)
        try:
            call.receive(body)
            if isinstance(message, messages.StageUpdate):
                self._shard.examine(message, body)  # without the lock, so that updates are checked at the same time
        except BaseException:
            with self._shard_lock:
                self._shard.abandoned(message)
            raise
        with self._shard_lock:
            answer, weights = self._shard.run(message, body)
        # The weights are sent without the lock, as nothing changes them during this VW's read lease. If the VW's lease
        # ends meanwhile, the read weights may be torn, but the coordinator refuses the VW before it uses them.
        return Reply(messages.encode(answer), weights)

    def _run_coordinator(self, message: messages.Request, body: memoryview) -> Reply:
        with self._changed:
            try:
                began = now = time.monotonic()
                answer, parts = self._coordinator.handle(message, now, body)
                self._changed.notify_all()
                while isinstance(answer, messages.NotYet) and now - began < self._longest_wait and not self._closed:
                    expiry = self._coordinator.next_expiry()
                    rest = began + self._longest_wait - now
                    self._changed.wait(rest if expiry is None else max(0.001, min(rest, expiry - now)))
                    now = time.monotonic()
                    answer, parts = self._coordinator.handle(message, now, body, again=True)
            except RemoteFault:
                self._changed.notify_all()  # leases may have run out
                raise
            if not isinstance(answer, messages.NotYet):
                self._changed.notify_all()  # this request may have changed the state
        return Reply(messages.encode(answer), [memoryview(part) for part in parts])


def _read(method: str, header: bytes) -> messages.Request | messages.ShardRequest:
    message = messages.decode(header)
    if method == COORDINATOR_METHOD and isinstance(message, messages.Request):
        return message
    if method == SHARD_METHOD and isinstance(message, messages.ShardRequest):
        return message
    raise RemoteFault(Refusal.MALFORMED, f"'{method[:40]}' takes no {type(message).__name__}")
