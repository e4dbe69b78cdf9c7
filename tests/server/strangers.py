"""All that anybody, and a holder of the token by mistake, may send to a server while virtual workers train on it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from lightning_hetpipe.server.process.sessions import COORDINATOR_METHOD, SHARD_METHOD
from lightning_hetpipe.server.protocol.identifiers import Commit, UpdateId
from lightning_hetpipe.server.protocol.messages import (
    Arrive,
    Gather,
    Heartbeat,
    Join,
    Leave,
    Load,
    Loaded,
    Message,
    Pull,
    Pulled,
    Pushed,
    Read,
    Report,
    Request,
    StageUpdate,
    TrainingSignature,
    encode,
)
from lightning_hetpipe.server.transport.frames import CHUNK, Opening
from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.grpc_import import grpc
from lightning_hetpipe.server.transport.grpc_server import BEARER, MANY, ONE, SERVICE, TOKEN
from lightning_hetpipe.server.transport.interface import CallRefused, Unreachable
from lightning_hetpipe.server.transport.security import Security
from tests.server.transports import PATIENCE, eventually

OTHERS = TrainingSignature("9.9", 2, 0, "sum", 1, ("another=program",), ())
GARBAGE = (b"GET / HTTP/1.0\r\n\r\n", bytes(100_000), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000)


def messages(generation: str, clock: int) -> Iterator[tuple[Message, bytes]]:
    """Messages that make no sense now, with bodies: of a former incarnation, another time, VWs that there are not.

    Args:
        generation: The one that runs.
        clock: That of the wave that is open.
    """
    for vw in (0, 1, 7):
        for old in (
            StageUpdate(vw, 0, generation, clock),
            StageUpdate(vw, 0, generation, 0),
            StageUpdate(vw, 0, "", 0),
        ):
            yield old, b"too short"
        yield Pushed(vw, 0, generation, clock, True), b""
        yield Pull(vw, 0, generation, 99), b""
        yield Pulled(vw, 0, generation, 99), b""
        yield Arrive(vw, 0, generation, 1 << 40, True), b""
        yield Gather(vw, 0, generation, 0, 99), b"part"
        yield Heartbeat(vw, 0, generation), b""
        yield Loaded(vw, 0, generation), b""
        yield Leave(vw, 0, "ValueError: of long ago"), b""
        yield Leave(vw, 1 << 62, "ValueError: of another launch"), b""
        yield Join(vw, 0, 99, OTHERS, Report(), ("",)), b""
        yield Join(vw, 1 << 62, 1, OTHERS, Report(), ("",)), b""
        for claimed in (-1, 0, 1 << 40):
            yield Join(vw, 1 << 62, 1, replace(OTHERS, virtual_workers=claimed), Report(), ("",)), b""
        yield Load(vw, 0, "another", generation + "x", (), ()), b""
        yield Load(vw, 0, generation, generation, (), ()), b""
        yield Read(vw, 0, generation, 999, ()), b""
        yield Read(vw, 0, generation, 0, (Commit(UpdateId(vw, 0, 99), 1), Commit(UpdateId(vw, 0, 100), 0))), b""


def annoy(address: str, security: Security, session: str) -> int:
    """Sends all of it to ``session`` at ``address``, and waits for what comes back; returns how much was answered."""
    with closing(GrpcChannel(address, security)) as channel:

        def statuses() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(channel.call("status", b""))
            return found

        eventually(lambda: session in statuses(), f"{session} is not known")  # to a server that was started again
        status = statuses()[session]
        clock = max((member["clock"] for member in status["members"]), default=0)
        answered = 0
        for message, body in messages(status["generation"], clock):
            header = encode(message)
            method = COORDINATOR_METHOD if isinstance(message, Request) else SHARD_METHOD
            for where, told in (
                (f"{session}/{method}", header),
                (f"{session}/{method}", header[:-1]),
                (f"{session}/{method}", b"\xff" + header),
                (f"{session}/nothing", header),
                ("nothing", header),
            ):
                with suppress(CallRefused, Unreachable):  # somebody may kill the server meanwhile
                    channel.call(where, told, [memoryview(body)], timeout=PATIENCE)
                answered += 1
    with closing(GrpcChannel(address, replace(security, token="wrong"))) as stranger, suppress(CallRefused):
        stranger.call(f"{session}/{COORDINATOR_METHOD}", encode(Leave(0, 1 << 62, "ValueError: a stranger's")))
    if not security.encrypted:
        raw(address, security, session, status["generation"], clock)
    return answered


def raw(address: str, security: Security, session: str, generation: str, clock: int) -> None:
    """Bytes that no channel of ours would send: bodies larger, shorter or longer than they say, and mere bytes."""
    metadata = ((TOKEN, f"{BEARER}{security.token}"),)
    with grpc.insecure_channel(address) as channel:
        for body in bodies(session, generation, clock):
            for method in (ONE, MANY, "Nothing"):
                call = channel.stream_stream(f"/{SERVICE}/{method}")(iter(body), timeout=PATIENCE, metadata=metadata)
                with suppress(grpc.RpcError):
                    list(call)
    host, port = address.split(":")
    for garbage in GARBAGE:
        with suppress(ConnectionError), socket.create_connection((host, int(port)), PATIENCE) as connection:
            connection.sendall(garbage)  # to a server that lives, unless somebody has killed it just now


def bodies(session: str, generation: str, clock: int, incarnation: int = 0) -> list[list[bytes]]:
    """Messages of calls whose bodies are larger, shorter or longer than they say."""
    sizes = (1, 1 << 20, 1 << 40, (1 << 63) - 1)
    stage = encode(StageUpdate(0, incarnation, generation, clock))
    found = [
        [Opening(f"{session}/{method}", size, 0).pack(stage), bytes(9)]
        for size in sizes
        for method in (SHARD_METHOD, COORDINATOR_METHOD)
    ]
    return [*found, [], [b""], [bytes(1000)], [bytes(2 * CHUNK)], [Opening(f"{session}/x", 0, 1 << 60).pack(stage)]]
