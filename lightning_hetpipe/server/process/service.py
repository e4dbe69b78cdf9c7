"""A server's handler: the pure coordinator and shard behind one lock each, and waits that end after seconds.

A request that cannot be answered yet waits here until something changes, for ``patience`` at most; then its sender is
told to ask again. So a wait costs no traffic, and a lost answer no more than that.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import get_args

from lightning_hetpipe.server.protocol.coordinator import Coordinator
from lightning_hetpipe.server.protocol.decisions import Note, ignore
from lightning_hetpipe.server.protocol.gathers import LIMIT
from lightning_hetpipe.server.protocol.identifiers import Refusal, RemoteFault
from lightning_hetpipe.server.protocol.messages import (
    Answer,
    Failed,
    Fetch,
    Join,
    Message,
    NotYet,
    Read,
    Refused,
    Request,
    ShardRequest,
    StageUpdate,
    decode,
    encode,
)
from lightning_hetpipe.server.protocol.shard import Shard
from lightning_hetpipe.server.transport.interface import CallRefused, Reply

COORDINATOR_METHOD = "coordinator"
SHARD_METHOD = "shard"


class Service:
    """What one server does: it owns a shard, and all of them can be the coordinator, of which VWs use one.

    Args:
        lease: seconds of silence after which a VW is left out.
        limit: bytes of weights that the shard may hold; ``None`` for any number.
        gather_limit: bytes that a VW may give to a gather.
        patience: seconds for which a request waits.
        now: the time, in seconds; of any origin, but steady.
        gone: incarnations of VWs whose time here is over, as `gone` of a service that this one takes the place of.
        note: told every decision of the coordinator about weights; it must not wait.
    """

    def __init__(
        self,
        lease: float,
        *,
        limit: int | None = None,
        gather_limit: int = LIMIT,
        patience: float = 2.0,
        now: Callable[[], float] = time.monotonic,
        gone: Mapping[int, int] | None = None,
        note: Note = ignore,
    ) -> None:
        self.epoch = secrets.token_hex(8)
        self._patience = min(patience, lease / 3)  # who waits is not heard
        self._now = now
        self._coordinator = Coordinator(self.epoch, lease, gather_limit, gone, note)
        self._closed = False
        self._changed = threading.Condition()
        self._shard = Shard(self.epoch, limit)
        self._shard_lock = threading.Lock()

    @property
    def finished(self) -> bool:
        """Whether VWs have come, and all are gone."""
        with self._changed:
            self._coordinator.tick(self._now())
            return self._coordinator.finished

    @property
    def unused(self) -> bool:
        """Whether no VW has come, and nothing is held."""
        return self.elsewhere and not self.bytes_held

    @property
    def elsewhere(self) -> bool:
        """Whether no VW has come: the coordinator is another server, if there is one."""
        with self._changed:
            return self._coordinator.unused

    @property
    def gone(self) -> Mapping[int, int]:
        """Of each VW that is gone, the last incarnation."""
        with self._changed:
            return dict(self._coordinator.gone)

    def close(self) -> None:
        """Wakes whatever waits in ``run``, now and later; it is told to ask again, and finds nobody."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def bytes_held(self) -> int:
        """Weights and staged updates in host memory."""
        with self._shard_lock:
            return self._shard.bytes_held

    def open(self, method: str, header: bytes, size: int, offered: memoryview | None = None) -> memoryview:
        try:
            message = _read(method, header)
            if isinstance(message, ShardRequest):
                with self._shard_lock:
                    return self._shard.open(message, size, offered)
            with self._changed:
                self._coordinator.check(message, size)
        except RemoteFault as fault:
            raise CallRefused(fault.sentence) from fault
        return memoryview(bytearray(size))

    def abandoned(self, method: str, header: bytes, body: memoryview) -> None:
        message = _read(method, header)
        if isinstance(message, ShardRequest):
            with self._shard_lock:
                self._shard.abandoned(message)

    def run(self, method: str, header: bytes, body: memoryview) -> Reply:
        try:
            message = _read(method, header)
            if isinstance(message, ShardRequest):
                return self._run_shard(message, body)
            return self._run_coordinator(message, bytes(body))
        except RemoteFault as fault:
            return Reply(encode(Refused(self.epoch, fault.refusal, str(fault))))

    def _run_shard(self, message: ShardRequest, body: memoryview) -> Reply:
        if isinstance(message, StageUpdate):
            try:
                self._shard.examine(message, body)  # without the lock: others' updates are read at the same time
            except RemoteFault:
                with self._shard_lock:
                    self._shard.abandoned(message)
                raise
        with self._shard_lock:
            answer, weights = self._shard.run(message, body)
        if isinstance(message, Read):
            _as_large_as_asked_for(answer)
        # The weights are sent without the lock. Nothing changes them while this VW's turn lasts; if that ended with its
        # lease, what it reads may be torn, and the coordinator tells it so before it uses them.
        return Reply(encode(answer), weights)

    def _run_coordinator(self, message: Request, body: bytes) -> Reply:
        with self._changed:
            began = now = self._now()
            answer, parts = self._coordinator.handle(message, now, body)
            self._changed.notify_all()
            while isinstance(answer, NotYet) and now - began < self._patience and not self._closed:
                expiry = self._coordinator.next_expiry()
                rest = began + self._patience - now
                self._changed.wait(rest if expiry is None else max(0.001, min(rest, expiry - now)))
                now = self._now()
                answer, parts = self._coordinator.handle(message, now, body, again=True)
            if not isinstance(answer, NotYet | Failed):
                self._changed.notify_all()  # this answer may have been what changed things
        if isinstance(message, Fetch):
            _as_large_as_asked_for(answer)
        rejected = ""
        if isinstance(message, Join) and isinstance(answer, Refused) and answer.refusal is not Refusal.STALE:
            rejected = answer.why
        return Reply(encode(answer), [memoryview(part) for part in parts], rejected=rejected)


def _as_large_as_asked_for(answer: Answer) -> None:
    """Who asks for a body has made room for it, and a reply must fit: what has no body is said as a refusal."""
    if isinstance(answer, Refused):
        raise CallRefused(RemoteFault(answer.refusal, answer.why).sentence)
    if isinstance(answer, Failed):
        raise CallRefused(RemoteFault(Refusal.FAILED, f"VW {answer.vw} failed: {answer.failure}").sentence)


def _read(method: str, header: bytes) -> Request | ShardRequest:
    message: Message = decode(header)
    kinds = {COORDINATOR_METHOD: get_args(Request), SHARD_METHOD: get_args(ShardRequest)}.get(method, ())
    if not isinstance(message, Request | ShardRequest) or type(message) not in kinds:
        raise RemoteFault(Refusal.MALFORMED, f"'{method[:40]}' takes no {type(message).__name__}")
    return message
