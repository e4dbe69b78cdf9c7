"""Sessions: independent services behind one address, because a launch trains several times, and talks between fits."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.process.link_probe import LinkProbe
from lightning_hetpipe.server.process.service import SHARD_METHOD, Service
from lightning_hetpipe.server.protocol.decisions import Decision, ignore, line
from lightning_hetpipe.server.transport import interface
from lightning_hetpipe.settings import Bounds

MOST = 64
"""Number of sessions kept at a time. Beyond it, sessions that all VWs have left are dropped."""

_NAME = re.compile(r"[a-z]{1,20}-\d{1,9}")


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

    def serve(self, call: interface.IncomingCall) -> interface.Reply:
        if call.method == interface.STATUS:
            return interface.Reply(json.dumps(self.status()).encode())
        if call.method == interface.LINK:
            return self._link_probe.serve(call)
        name, method = _parts(call.method)
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
                    raise interface.CallRefused(f"busy: {MOST} sessions are in use")
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
                os.write(self._log, line(session, decision, time.time()).encode())

    def _clear(self, name: str, service: Service) -> None:
        if service.finished:
            with self._lock:
                if self._services.get(name) is service:
                    self._services[name] = self._new(name, service.gone)

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


def _parts(method: str) -> tuple[str, str]:
    """Split a method into the session's name and the method within the session."""
    name, slash, rest = method.partition("/")
    if not slash or not _NAME.fullmatch(name):
        raise interface.CallRefused(f"malformed: '{method[:40]}' names no session")
    return name, rest


class SessionChannel:
    """Channel to one ``session`` over ``channel``, which stays open when this one is closed. ``address`` is the
    server's, for other processes that call it."""

    def __init__(self, channel: interface.Channel, session: str, address: str = "") -> None:
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
