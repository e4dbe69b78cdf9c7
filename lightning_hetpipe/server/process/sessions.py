"""Sessions: independent services behind one address, because a launch trains several times, and talks between fits.

A service is the pure coordinator and the pure shard, each behind one lock. A request without an answer yet waits in the
service for a change, at most for ``longest_wait``. Then its sender has to ask again. So a wait costs no traffic, and a
lost answer costs at most one wait.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.process.link_probe import LinkProbe
from lightning_hetpipe.server.protocol import messages
from lightning_hetpipe.server.protocol.commit_log import Decision, Note, ignore
from lightning_hetpipe.server.protocol.coordinator import Coordinator
from lightning_hetpipe.server.protocol.identifiers import Refusal, RemoteFault
from lightning_hetpipe.server.protocol.shard import Shard
from lightning_hetpipe.server.transport.interface import LINK, STATUS, CallRefused, Channel, IncomingCall, Reply
from lightning_hetpipe.settings import Bounds

COORDINATOR_METHOD = "coordinator"
SHARD_METHOD = "shard"

MOST = 64
"""Number of sessions kept at a time. Beyond it, sessions that all VWs have left are dropped."""

_NAME = re.compile(r"[a-z]{1,20}-\d{1,9}")


class Service:
    """Session of a server, with a shard. Any server can be the coordinator, and VWs use one server as coordinator.

    Args:
        lease: Seconds of silence after which a VW is left out.
        longest_wait: Seconds for which a request waits.
        gone: The `left_by` of the service that this service replaces.
        note: Receives every decision of the coordinator about weights. It must not wait.
    """

    def __init__(
        self, lease: float, *, longest_wait: float = 2.0, gone: Mapping[int, int] | None = None, note: Note = ignore
    ) -> None:
        epoch = secrets.token_hex(8)
        self._longest_wait = min(longest_wait, lease / 3)  # a VW that waits is not heard
        self._coordinator = Coordinator(epoch, lease, gone, note)
        self._closed = False
        self._changed = threading.Condition()
        self._shard = Shard(epoch)
        self._shard_lock = threading.Lock()

    @property
    def left_by(self) -> Mapping[int, int] | None:
        """Last incarnation of each VW once VWs have come, and all are gone. None before."""
        with self._changed:
            return dict(self._coordinator.gone) if self._coordinator.finished(time.monotonic()) else None

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


class Sessions:
    """Handler that gives each session its own :class:`Service`. A method such as "fit-1/shard" names the session.

    When all VWs have left a session or were left out, its memory is freed and it can be entered again. VWs that come
    back from before are refused, because the other VWs have gone on. A server that is not the coordinator frees a
    session's memory when the next session's weights come.

    ``lease`` is the seconds of silence after which a VW is left out. The file ``log`` gets each decision of a
    coordinator about weights, as a line of JSON. SettingError is raised if it cannot be written.
    """

    def __init__(self, lease: Annotated[float, Bounds(0.001)], log: str | None = None) -> None:
        self._lease = lease
        try:
            self._log = None if log is None else os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise SettingError(f"log={log} cannot be written ({error.strerror}); give another file") from error
        self._services: dict[str, Service] = {}
        self._link_probe = LinkProbe()
        self._loaded: str | None = None
        """The session whose shard received weights last."""
        self._lock = threading.Lock()
        self._log_lock = threading.Lock()
        self._closed = threading.Event()
        self._sweeper: threading.Thread | None = None

    def serve(self, call: IncomingCall) -> Reply:
        if call.method == STATUS:
            return Reply(json.dumps(self.status()).encode())
        if call.method == LINK:
            return self._link_probe.serve(call)
        name, slash, method = call.method.partition("/")
        if not slash or not _NAME.fullmatch(name):
            raise CallRefused(f"malformed: '{call.method[:40]}' names no session")
        service = self._service_of(name)
        try:
            reply = service.serve(replace(call, method=method))
        finally:
            self._clear(name, service)
        if method == SHARD_METHOD and name != self._loaded and call.size:  # sessions without weights replace nothing
            self._free_others(name)
        return reply

    def close(self) -> None:
        """Wake the calls that wait in ``serve``, end the thread that clears sessions, and close the log."""
        self._closed.set()
        for service in self._known().values():
            service.close()
        if self._sweeper is not None:
            self._sweeper.join()
        with self._log_lock:
            log, self._log = self._log, None
            if log is not None:
                os.close(log)

    def status(self) -> dict[str, Any]:
        """Return the lease, and the status of every session in use, as JSON values."""
        self._clear_all()
        found = {name: service.status() for name, service in self._known().items() if not service.unused}
        return {"sessions": len(found), "lease": self._lease, **found}

    def _known(self) -> dict[str, Service]:
        with self._lock:
            return dict(self._services)

    def _service_of(self, name: str) -> Service:
        with self._lock:
            if name not in self._services:
                for unused in [each for each, service in self._services.items() if service.unused]:
                    if len(self._services) >= MOST:
                        del self._services[unused]
                if len(self._services) >= MOST:
                    raise CallRefused(f"busy: {MOST} sessions are in use")
                self._services[name] = self._new(name)
                if self._sweeper is None:
                    self._sweeper = threading.Thread(target=self._sweep, name="hetpipe-sessions", daemon=True)
                    self._sweeper.start()
            return self._services[name]

    def _new(self, name: str, gone: Mapping[int, int] | None = None) -> Service:
        note = ignore if self._log is None else partial(self._write, name)
        return Service(self._lease, gone=gone, note=note)

    def _write(self, session: str, decision: Decision) -> None:
        with self._log_lock:
            if self._log is not None:
                os.write(self._log, log_line(session, decision, time.time()).encode())

    def _clear(self, name: str, service: Service) -> None:
        if (gone := service.left_by) is not None:
            with self._lock:
                if self._services.get(name) is service:
                    self._services[name] = self._new(name, gone)

    def _free_others(self, name: str) -> None:
        """Free the other sessions' shards. No shard hears that VWs leave, but fits of a launch follow each other."""
        with self._lock:
            self._loaded = name
            for other, service in self._services.items():
                if other != name and service.elsewhere and service.bytes_held:
                    self._services[other] = self._new(other)

    def _clear_all(self) -> None:
        for name, service in self._known().items():
            self._clear(name, service)

    def _sweep(self) -> None:
        """Clear sessions whose members were killed, because ``serve`` does not notice that."""
        while not self._closed.wait(self._lease):
            self._clear_all()


def log_line(session: str, decision: Decision, at: float) -> str:
    """Write a session's ``decision`` as a line of JSON. ``at`` is its time in seconds since 1970."""
    told = {"time": round(at, 6), "session": session, "decision": type(decision).__name__}
    return json.dumps({**told, **asdict(decision)}) + "\n"


class SessionChannel:
    """Channel to one ``session`` over ``channel``, which stays open when this one is closed. ``address`` is the
    server's, for other processes that call it."""

    def __init__(self, channel: Channel, session: str, address: str = "") -> None:
        self._channel = channel
        self._session = session
        self.address = address

    def method(self, name: str) -> str:
        """Return the full method for ``name`` in the session, for callers by the server's address."""
        return f"{self._session}/{name}"

    def call(self, method: str, *arguments: Any, **named: Any) -> bytes:
        return self._channel.call(self.method(method), *arguments, **named)

    def close(self) -> None:
        """Leave the channel open for the other sessions."""
