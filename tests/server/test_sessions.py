"""Sessions: several services behind one address, apart from each other, and what they say of themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import torch

from lightning_hetpipe.cli.hetpipe_server import laid_out
from lightning_hetpipe.server.process.client import Client
from lightning_hetpipe.server.process.sessions import COORDINATOR_METHOD, SessionChannel, Sessions
from lightning_hetpipe.server.protocol.identifiers import RemoteFault
from lightning_hetpipe.server.protocol.messages import (
    Join,
    NotYet,
    Parameter,
    Report,
    TrainingSignature,
    decode,
    encode,
)
from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.grpc_server import GrpcServer
from lightning_hetpipe.server.transport.interface import CallRefused, IncomingCall
from lightning_hetpipe.server.transport.security import Security
from tests.server.channels import filler
from tests.server.transports import PATIENCE, eventually


@contextmanager
def served() -> Iterator[GrpcChannel]:
    with ExitStack() as stack:
        sessions = Sessions(10.0)
        stack.callback(sessions.close)
        server = stack.enter_context(GrpcServer(sessions, "127.0.0.1:0", Security(token="t")))
        channel = GrpcChannel(server.address, Security(token="t"))
        stack.callback(channel.close)
        yield channel


def client(channel: GrpcChannel, session: str, size: int, incarnation: int = 1) -> Client:
    parameters = (Parameter("w", (size,), "float32", "float32"),)
    signature = TrainingSignature("1", 1, 0, "sum", 1, (), parameters)
    return Client([SessionChannel(channel, session)], signature, [[0]], 0, incarnation, lease=10.0, timeout=20.0)


def test_sessions_are_apart() -> None:
    with served() as channel, client(channel, "fit-1", 3) as one, client(channel, "fit-2", 5) as other:
        assert torch.equal(one.join([torch.ones(3)])[0], torch.ones(3))
        assert torch.equal(other.join([torch.zeros(5)])[0], torch.zeros(5))
        assert torch.equal(one.synchronise([torch.ones(3)])[0], torch.full((3,), 2.0))
        assert torch.equal(other.synchronise([torch.ones(5)])[0], torch.ones(5))
        one.leave()
        other.leave()


def test_the_status_tells_of_every_session() -> None:
    with served() as channel, client(channel, "fit-1", 3) as one:
        one.join([torch.ones(3)])
        one.synchronise([torch.ones(3)])
        status: Any = json.loads(channel.call("status", b""))
        assert status["sessions"] == 1
        member = status["fit-1"]["members"][0]
        assert (member["vw"], member["clock"], member["lag"], member["waits_at_cut"]) == (0, 1, 0, False)
        assert status["fit-1"]["slowest"] == 1
        assert status["fit-1"]["held_bytes"] >= 12
        assert "clock" in laid_out(status)
        one.leave()


@pytest.mark.parametrize("method", ["shard", "../x/shard", "Fit-1/shard", "fit-x/shard", "/", "fit-1"])
def test_what_names_no_session_is_refused(method: str) -> None:
    with served() as channel, pytest.raises(CallRefused):
        channel.call(method, b"x")


def status_of(channel: GrpcChannel) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(channel.call("status", b""))
    return status


def test_a_session_that_all_have_left_gives_its_memory_back_and_can_be_entered_again() -> None:
    """The weights of 64 fits were kept; and the next launch on the same server, whose sessions have the same names, was
    refused for its other model, or waited for ever to join the one before."""
    with served() as channel:
        for incarnation, size in enumerate([3, 5], start=1):
            with client(channel, "fit-1", size, incarnation) as one:
                assert torch.equal(one.join([torch.ones(size)])[0], torch.ones(size))
                assert status_of(channel)["fit-1"]["held_bytes"] >= size
            assert status_of(channel).keys() == {"sessions", "lease"}


def test_a_session_whose_members_were_killed_is_cleared_when_their_leases_end() -> None:
    sessions = Sessions(0.2)
    with closing(sessions), GrpcServer(sessions) as server, closing(GrpcChannel(server.address)) as channel:
        one = client(channel, "fit-1", 3)
        one.join([torch.ones(3)])  # without a heartbeat
        eventually(lambda: not held(sessions), "the weights are still there")
        with pytest.raises(RemoteFault, match="longer than its lease"):
            one.synchronise([torch.ones(3)])
        one.close()


def test_a_server_that_is_not_the_coordinator_keeps_one_fits_weights() -> None:
    """It kept those of every fit of the launch, and its status said that nobody was there."""
    coordinator, beside = Sessions(10.0), Sessions(10.0)
    parameters = tuple(Parameter(name, (1000,), "float32", "float32") for name in "ab")
    signature = TrainingSignature("1", 1, 0, "sum", 2, (), parameters)
    with ExitStack() as stack:
        channels = []
        for sessions in (coordinator, beside):
            stack.callback(sessions.close)
            channels.append(GrpcChannel(stack.enter_context(GrpcServer(sessions)).address))
            stack.callback(channels[-1].close)
        for incarnation, fit in enumerate(("fit-1", "fit-2", "fit-3", "fit-1"), start=1):
            through = [SessionChannel(channel, fit) for channel in channels]
            with Client(through, signature, [[0], [1]], 0, incarnation, lease=10.0, timeout=20.0) as one:
                one.join([torch.ones(1000), torch.ones(1000)])
                one.synchronise([torch.ones(1000), torch.ones(1000)])
                assert status_of(channels[1]).keys() == {"sessions", "lease", fit}
                assert held(beside) <= 2 * 4096


def held(sessions: Sessions) -> int:
    """Bytes, without a call that would make the server look after its sessions."""
    return sum(session.bytes_held for session in sessions._known().values())


def test_closing_wakes_who_waits() -> None:
    """A server that was told to end waited for the requests that waited in it."""
    sessions = Sessions(3000.0)
    service = sessions._service_of("fit-1")
    service._longest_wait = PATIENCE * 10
    signature = TrainingSignature("1", 2, 0, "sum", 1, (), ())
    join = encode(Join(0, 1, 1, signature, Report(), ("",)))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sessions.serve, IncomingCall(f"fit-1/{COORDINATOR_METHOD}", join, 0, filler(b"")))
        eventually(lambda: session_is_entered(sessions), "the request has not come")
        sessions.close()
        assert isinstance(decode(waiting.result(PATIENCE).header), NotYet)


def session_is_entered(sessions: Sessions) -> bool:
    return not sessions._service_of("fit-1").unused
