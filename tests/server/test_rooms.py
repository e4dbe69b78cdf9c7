"""Rooms: several services behind one address, apart from each other, and what they say of themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from lightning_hetpipe.cli.status import laid_out
from lightning_hetpipe.server.client import Client
from lightning_hetpipe.server.grpc_server import GrpcServer
from lightning_hetpipe.server.grpc_transport import GrpcChannel
from lightning_hetpipe.server.messages import Parameter, Signature
from lightning_hetpipe.server.rooms import RoomChannel, Rooms
from lightning_hetpipe.server.security import Security
from lightning_hetpipe.server.transport import Refused


@contextmanager
def served() -> Iterator[GrpcChannel]:
    with ExitStack() as stack:
        rooms = Rooms(10.0)
        stack.callback(rooms.close)
        server = stack.enter_context(GrpcServer(rooms, "127.0.0.1:0", Security(token="t")))
        channel = GrpcChannel(server.address, Security(token="t"))
        stack.callback(channel.close)
        yield channel


def client(channel: GrpcChannel, room: str, size: int) -> Client:
    parameters = (Parameter("w", (size,), "float32", "float32"),)
    signature = Signature("1", 1, 0, "sum", 1, (), parameters)
    return Client([RoomChannel(channel, room)], signature, [[0]], 0, 1, lease=10.0, timeout=20.0)


def test_rooms_are_apart() -> None:
    with served() as channel, client(channel, "fit-1", 3) as one, client(channel, "fit-2", 5) as other:
        assert torch.equal(one.join([torch.ones(3)])[0], torch.ones(3))
        assert torch.equal(other.join([torch.zeros(5)])[0], torch.zeros(5))
        assert torch.equal(one.synchronise([torch.ones(3)])[0], torch.full((3,), 2.0))
        assert torch.equal(other.synchronise([torch.ones(5)])[0], torch.ones(5))
        one.leave()
        other.leave()


def test_the_status_tells_of_every_room() -> None:
    with served() as channel, client(channel, "fit-1", 3) as one:
        one.join([torch.ones(3)])
        one.synchronise([torch.ones(3)])
        status: Any = json.loads(channel.call("status", b""))
        assert status["rooms"] == 1
        assert status["fit-1"]["members"][0]["clock"] == 1
        assert status["fit-1"]["held_bytes"] >= 12
        assert "clock" in laid_out(status)
        one.leave()


@pytest.mark.parametrize("method", ["shard", "../x/shard", "Fit-1/shard", "fit-x/shard", "/", "fit-1"])
def test_what_names_no_room_is_refused(method: str) -> None:
    with served() as channel, pytest.raises(Refused):
        channel.call(method, b"x")
