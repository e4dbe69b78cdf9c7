"""Several independent services behind one address: a launch trains more than once, and talks outside of training."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.process.service import COORDINATOR_METHOD, SHARD_METHOD, Service
from lightning_hetpipe.server.protocol.decisions import Decision, ignore, line
from lightning_hetpipe.server.protocol.messages import AskStatus, Status, decode, encode
from lightning_hetpipe.server.transport.interface import HEADER_LIMIT, STATUS, TIMEOUT, CallRefused, Channel, Reply

MOST = 64
"""Rooms that are known at a time; of more than that the oldest one goes that all have left."""

_NAME = re.compile(r"[a-z]{1,20}-\d{1,9}")


class Sessions:
    """A handler that gives each room, named in a method such as "fit-1/shard", a :class:`Service` of its own.

    When all have left a room, or were left out, its memory is given back: it is as if nobody had been there, but for
    those who come back from that time, who are told that the others have gone on without them. A server that is not the
    coordinator gives a room's memory back when the next room's weights come.

    Args:
        lease: Seconds of silence after which a VW is left out.
        log: A file to which every decision of a coordinator about weights is appended, as a line of JSON; None: none.

    Raises:
        SettingError: if the file cannot be written.
    """

    def __init__(self, lease: float, log: str | None = None) -> None:
        self._lease = lease
        try:
            self._log = None if log is None else os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise SettingError(f"log={log} cannot be written: {error.strerror}") from error
        self._rooms: dict[str, Service] = {}
        self._loaded: str | None = None
        """The room whose shard was used last."""
        self._lock = threading.Lock()
        self._log_lock = threading.Lock()
        self._closed = threading.Event()
        self._sweeper: threading.Thread | None = None

    def open(self, method: str, header: bytes, size: int, offered: memoryview | None = None) -> memoryview:
        if method == STATUS:
            return memoryview(bytearray(size if size <= HEADER_LIMIT else 0))
        name, method = _parts(method)
        return self._room(name).open(method, header, size, offered)

    def run(self, method: str, header: bytes, body: memoryview) -> Reply:
        if method == STATUS:
            return Reply(json.dumps(self.status()).encode())
        name, method = _parts(method)
        room = self._room(name)
        if method == SHARD_METHOD and name != self._loaded and len(body):  # rooms without weights take no one's place
            self._turn_to(name)
        reply = room.run(method, header, body)
        self._clear(name, room)
        return reply

    def abandoned(self, method: str, header: bytes, body: memoryview) -> None:
        if method != STATUS:
            name, method = _parts(method)
            self._room(name).abandoned(method, header, body)

    def close(self) -> None:
        """Wakes whatever waits in ``run``; ends the thread that looks after rooms, and the log."""
        self._closed.set()
        for room in self._known().values():
            room.close()
        if self._sweeper is not None:
            self._sweeper.join()
        with self._log_lock:
            log, self._log = self._log, None
            if log is not None:
                os.close(log)

    def status(self) -> dict[str, Any]:
        """The lease; clocks, members, lag and bytes of every room that somebody is in, as JSON can say them."""
        self._clear_all()
        found: dict[str, Any] = {}
        for name, room in self._known().items():
            if not room.unused:
                told = decode(room.run(COORDINATOR_METHOD, encode(AskStatus()), memoryview(b"")).header)
                assert isinstance(told, Status)
                found[name] = {**_shown(told), "held_bytes": room.bytes_held}
        return {"rooms": len(found), "lease": self._lease, **found}

    def _known(self) -> dict[str, Service]:
        with self._lock:
            return dict(self._rooms)

    def _room(self, name: str) -> Service:
        with self._lock:
            if name not in self._rooms:
                self._make_way()
                self._rooms[name] = self._service(name)
                if self._sweeper is None:
                    self._sweeper = threading.Thread(target=self._sweep, name="hetpipe-rooms", daemon=True)
                    self._sweeper.start()
            return self._rooms[name]

    def _service(self, name: str, gone: Mapping[int, int] | None = None) -> Service:
        note = ignore if self._log is None else partial(self._write, name)
        return Service(self._lease, gone=gone, note=note)

    def _write(self, room: str, decision: Decision) -> None:
        with self._log_lock:
            if self._log is not None:
                os.write(self._log, line(room, decision).encode())

    def _make_way(self) -> None:
        for name in [name for name, room in self._rooms.items() if room.unused]:
            if len(self._rooms) >= MOST:
                del self._rooms[name]
        if len(self._rooms) >= MOST:
            raise CallRefused(f"busy: {MOST} rooms are in use")

    def _clear(self, name: str, room: Service) -> None:
        if room.finished:
            with self._lock:
                if self._rooms.get(name) is room:
                    self._rooms[name] = self._service(name, room.gone)

    def _turn_to(self, name: str) -> None:
        """A shard hears nothing of who leaves. A launch's fits follow each other: this one says that others ended."""
        with self._lock:
            self._loaded = name
            for other, room in self._rooms.items():
                if other != name and room.elsewhere and room.bytes_held:
                    self._rooms[other] = self._service(other)

    def _clear_all(self) -> None:
        for name, room in self._known().items():
            self._clear(name, room)

    def _sweep(self) -> None:
        """Who was killed says nothing that ``run`` could see."""
        while not self._closed.wait(self._lease):
            self._clear_all()


def _shown(status: Status) -> dict[str, Any]:
    """As a person reads it: how far each member is ahead of the slowest, unless it waits at a cut, as all may."""
    slowest = None if status.slowest < 0 else status.slowest
    members = []
    for member in status.members:
        waits = member.waits_at >= 0
        lag = None if waits or slowest is None else member.clock - slowest
        shown = {"vw": member.vw, "clock": member.clock, "lag": lag, "waits_at_cut": waits}
        members.append({**shown, "silent_ms": member.silent_ms, "incarnation": member.incarnation})
    return {**asdict(status), "slowest": slowest, "members": members}


def _parts(method: str) -> tuple[str, str]:
    """The room's name, and the method in it."""
    name, slash, rest = method.partition("/")
    if not slash or not _NAME.fullmatch(name):
        raise CallRefused(f"malformed: '{method[:40]}' names no room")
    return name, rest


class SessionChannel:
    """``channel``, as one to ``room`` alone. Closing it leaves ``channel`` open."""

    def __init__(self, channel: Channel, room: str) -> None:
        self._channel = channel
        self._room = room

    def call(
        self,
        method: str,
        header: bytes,
        body: Sequence[memoryview] = (),
        into: Sequence[memoryview] = (),
        timeout: float = TIMEOUT,
    ) -> bytes:
        return self._channel.call(f"{self._room}/{method}", header, body, into, timeout)

    def close(self) -> None:
        """Leaves the channel to the other rooms."""
