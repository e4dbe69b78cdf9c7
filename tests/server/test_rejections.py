"""A server says whom it turned away: once, in few lines, whoever comes and whatever they send."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest
import torch

from lightning_hetpipe.server.process.client import Client
from lightning_hetpipe.server.process.sessions import SessionChannel, Sessions
from lightning_hetpipe.server.protocol.identifiers import RemoteFault
from lightning_hetpipe.server.protocol.messages import Parameter, TrainingSignature
from lightning_hetpipe.server.transport import grpc_channel
from lightning_hetpipe.server.transport.frames import Opening
from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.grpc_import import grpc
from lightning_hetpipe.server.transport.grpc_server import BEARER, MANY, ONE, SERVICE, TOKEN, GrpcServer
from lightning_hetpipe.server.transport.interface import RELEASE, CallRefused
from lightning_hetpipe.server.transport.security import EVERY, MOST, Rejections, Security, host_of
from tests.server.transports import PATIENCE

PARAMETERS = (Parameter("w", (4,), "float32", "float32"),)


def test_the_same_is_said_once_in_a_while_and_then_how_often_it_was() -> None:
    said: list[str] = []
    time = [0.0]
    rejections = Rejections(said.append, lambda: time[0])
    for port in range(100):
        rejections.note(f"ipv4:10.0.0.1:{port}", "it shows no token")
    rejections.note("ipv4:10.0.0.2:1", "it shows no token")
    time[0] = EVERY
    rejections.note("ipv4:10.0.0.1:100", "it shows no token")
    assert said == [
        "hetpipe server: turned away 10.0.0.1: it shows no token",
        "hetpipe server: turned away 10.0.0.2: it shows no token",
        "hetpipe server: turned away 10.0.0.1: it shows no token (since the last such line 99 more were)",
    ]


def test_many_peers_and_reasons_make_few_short_lines() -> None:
    said: list[str] = []
    rejections = Rejections(said.append, lambda: 0.0)
    for number in range(10_000):
        rejections.note(f"ipv4:10.0.{number // 250}.{number % 250}:1", f"\x1b[2J\r\n\u202e{number}" + "x" * 100_000)
    assert len(said) == MOST
    assert all(line.isprintable() and len(line) < 1000 for line in said)


@pytest.mark.parametrize(
    ("peer", "host"),
    [("ipv4:10.0.0.1:4711", "10.0.0.1"), ("ipv6:%5B::1%5D:4711", "::1"), ("unix:", "unix:"), ("\x1b", "?")],
)
def test_hosts_are_known_by_their_address(peer: str, host: str) -> None:
    assert host_of(peer) == host


def test_who_shows_no_token_or_a_wrong_one_or_is_of_another_release(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GrpcServer(Sessions(30.0), security=Security(token="right")) as server:
        for token in (None, "wrong"):
            with closing(GrpcChannel(server.address, Security(token=token))) as stranger, pytest.raises(CallRefused):
                stranger.call("talk-1/coordinator", b"")
        opening = Opening("status", 0, 0).pack(b"")
        with grpc.insecure_channel(server.address) as channel:
            call = channel.unary_unary(f"/{SERVICE}/{ONE}")
            with pytest.raises(grpc.RpcError):
                call(b"HPT\x01" + opening[4:], timeout=PATIENCE, metadata=((TOKEN, f"{BEARER}right"),))
        monkeypatch.setattr(grpc_channel, "RELEASE", "9.9~")
        says = f"the caller is of lightning-hetpipe 9.9~, and the server of {RELEASE}; install the same release on all"
        with closing(GrpcChannel(server.address, Security(token="right"))) as other:
            for _ in range(2):
                with pytest.raises(CallRefused, match=says):
                    other.call("talk-1/coordinator", b"")
    assert caplog.messages == [
        "hetpipe server: turned away 127.0.0.1: it shows no token; HETPIPE_TOKEN must be the same everywhere",
        "hetpipe server: turned away 127.0.0.1: it shows a wrong token; HETPIPE_TOKEN must be the same everywhere",
        "hetpipe server: turned away 127.0.0.1: this is not an opening of version 7, but of version 1 of these"
        f" messages; client and server must be of one release of lightning-hetpipe, and this process is of {RELEASE}",
        f"hetpipe server: turned away 127.0.0.1: it is of lightning-hetpipe 9.9~, and the server of {RELEASE}",
    ]


def test_a_call_that_ended_before_its_first_message_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    """An interrupted virtual worker made one, and a line about it followed the line about the interrupt."""
    with GrpcServer(Sessions(30.0)) as server, grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/{MANY}")(iter(()), timeout=PATIENCE)
        with pytest.raises(grpc.RpcError, match="an opening is cut off"):
            next(call)
    assert caplog.messages == []


def test_who_is_of_another_launch_or_differs_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    """And who trains is not mentioned: what befalls its requests is no matter for people."""
    with ExitStack() as stack:
        sessions = Sessions(30.0)
        stack.callback(sessions.close)
        server = stack.enter_context(GrpcServer(sessions))
        channel = stack.enter_context(closing(GrpcChannel(server.address)))

        def client(release: str, launch: str, incarnation: int) -> Client:
            signature = TrainingSignature(release, 1, 0, "sum", 1, (f"launch={launch}",), PARAMETERS)
            session = SessionChannel(channel, "fit-1")
            return stack.enter_context(Client([session], signature, [[0]], 0, incarnation, timeout=PATIENCE))

        member = client("1", "a", 1)
        member.join([torch.zeros(4)])
        for release, launch in (("1", "b"), ("1", "b"), ("9", "a")):
            with pytest.raises(RemoteFault):
                client(release, launch, 2).join([torch.zeros(4)])
        member.synchronise([torch.ones(4)])
        member.leave()
    differs = "hetpipe server: turned away 127.0.0.1: VW 0 differs from the VW that came first:"
    assert caplog.messages == [f"{differs} 'launch=b' instead of 'launch=a'", f"{differs} version: '9' instead of '1'"]
