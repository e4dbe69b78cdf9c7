"""Several independent services behind one address: a launch trains more than once, and talks outside of training."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning_hetpipe.server.messages import AskStatus, Status, decode, encode
from lightning_hetpipe.server.service import COORDINATOR_METHOD, Service
from lightning_hetpipe.server.transport import HEADER_LIMIT, TIMEOUT, Channel, Refused, Reply

STATUS = "status"
"""The method that anybody with the token may call, in no room."""

MOST = 64
"""Rooms that are kept; of more than that the oldest one goes that all have left."""

_NAME = re.compile(r"[a-z]{1,20}-\d{1,9}")


class Rooms:
    """A handler that gives each room, named in a method such as "fit-1/shard", a :class:`Service` of its own.

    Args:
        lease: Seconds of silence after which a VW is left out.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._rooms: dict[str, Service] = {}
        self._lock = threading.Lock()

    def open(self, method: str, header: bytes, size: int) -> memoryview:
        if method == STATUS:
            return memoryview(bytearray(size if size <= HEADER_LIMIT else 0))
        room, method = self._room(method)
        return room.open(method, header, size)

    def run(self, method: str, header: bytes, body: memoryview) -> Reply:
        if method == STATUS:
            return Reply(json.dumps(self.status()).encode())
        room, method = self._room(method)
        return room.run(method, header, body)

    def abandoned(self, method: str, header: bytes, body: memoryview) -> None:
        if method == STATUS:
            return
        room, method = self._room(method)
        room.abandoned(method, header, body)

    def status(self) -> dict[str, Any]:
        """Clocks, members, lag and bytes of every room, as JSON can say them."""
        with self._lock:
            rooms = dict(self._rooms)
        found: dict[str, Any] = {}
        for name, room in rooms.items():
            told = decode(room.run(COORDINATOR_METHOD, encode(AskStatus()), memoryview(b"")).header)
            assert isinstance(told, Status)
            members = [asdict(member) for member in told.members]
            found[name] = {**asdict(told), "members": members, "held_bytes": room.bytes_held}
        return {"rooms": len(found), **found}

    def _room(self, method: str) -> tuple[Service, str]:
        name, slash, rest = method.partition("/")
        if not slash or not _NAME.fullmatch(name):
            raise Refused(f"malformed: '{method[:40]}' names no room")
        with self._lock:
            if name not in self._rooms:
                self._make_way()
                self._rooms[name] = Service(self._lease)
            return self._rooms[name], rest

    def _make_way(self) -> None:
        for name in [name for name, room in self._rooms.items() if room.finished]:
            if len(self._rooms) >= MOST:
                del self._rooms[name]
        if len(self._rooms) >= MOST:
            raise Refused(f"busy: {MOST} rooms are in use")


class RoomChannel:
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
