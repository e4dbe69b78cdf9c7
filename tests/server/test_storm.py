"""Hostile callers of a server process while virtual workers train: same bits, nothing grows, few lines say who."""

from __future__ import annotations

import resource
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_hetpipe.server.process.server_process import ServerProcess
from lightning_hetpipe.server.process.sessions import Sessions
from lightning_hetpipe.server.protocol.identifiers import RemoteFault
from lightning_hetpipe.server.protocol.messages import TrainingSignature
from lightning_hetpipe.server.transport import grpc_server
from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.grpc_server import CALLS, GrpcServer
from lightning_hetpipe.server.transport.interface import STATUS, Unreachable
from lightning_hetpipe.server.transport.security import Security
from tests.server.storm import FEW_ARENAS, GROWTH, PREFACE, Storm, Tap, check_log, shout, tuple_of
from tests.server.transports import PATIENCE, Desk, certificates, eventually
from tests.server.waves import SESSION, SIGNATURE, SIZE, client, waves
from tests.support import forks
from tests.support.certificates import make
from tests.support.process_use import Use

SESSIONS = "lightning_hetpipe.server.process.sessions:Sessions"
THREADS = 20
"""Those of a server that serves two virtual workers, and those of gRPC's core."""
DESCRIPTORS = 80
"""The limit of one that strangers may not bring to its knees."""


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are forks, which take two seconds less to start."""
    monkeypatch.setattr(subprocess, "Popen", partial(forks.Popen, loaded="libraries"))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20, thread_name_prefix="test-storm") as pool:
        yield pool


def limited(lease: float) -> Sessions:
    """Sessions in a process that may have few descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    return Sessions(lease)


def use_of(server: ServerProcess) -> Use:
    assert server.pid is not None
    return Use.of(server.pid)


@pytest.mark.parametrize(
    ("warm_up", "count"), [(360, 720), pytest.param(4000, 10_000, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_messages_of_every_kind(
    warm_up: int,
    count: int,
    pool: ThreadPoolExecutor,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(*FEW_ARENAS)
    began = time.monotonic()
    with (
        ServerProcess(SESSIONS, {"lease": PATIENCE}) as server,
        Tap(server.address) as tap,
        waves(tap.address, server.security, pool) as training,
    ):
        storm = Storm(server.address, server.security, SESSION, tap.recorded)
        training.go_on_beside(storm.blow(warm_up, pool))
        before, waves_before = use_of(server), training.done
        training.go_on_beside(storm.blow(count, pool))
        assert storm.sent == warm_up + count
        assert training.done > waves_before
        assert before.threads < CALLS + THREADS
        assert use_of(server).threads < CALLS + THREADS
        eventually(lambda: use_of(server).threads <= THREADS, "threads stay though the calls are over")
        eventually(lambda: use_of(server).descriptors <= before.descriptors, "descriptors stay")
        if count == 10_000:  # fewer are still a warm-up
            assert use_of(server).memory < before.memory + GROWTH
    check_log(capfd.readouterr().err, time.monotonic() - began)


def test_another_runs_virtual_worker_and_another_versions(
    pool: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    """The end of a virtual worker of another run ended the training, as that one's incarnation is the newer one."""
    with (
        ServerProcess(SESSIONS, {"lease": PATIENCE}) as server,
        waves(server.address, server.security, pool) as training,
    ):
        before = use_of(server)

        def join(signature: TrainingSignature, incarnation: int) -> None:
            """It fails as it joins, and would say so as it leaves."""
            stack = ExitStack()
            other = client(stack, server.address, server.security, 1, signature, incarnation)
            with pytest.raises(RemoteFault, match="differs from the VW that came first"), stack:
                other.join([torch.zeros(SIZE)])

        def others() -> None:
            for incarnation in range(2, 7):
                join(replace(SIGNATURE, settings=("launch=b",)), incarnation)
                join(replace(SIGNATURE, version="2"), incarnation)

        training.go_on_beside([pool.submit(others)])
        eventually(lambda: use_of(server).descriptors <= before.descriptors, "descriptors stay")
    said = [line for line in capfd.readouterr().err.splitlines() if "turned away" in line]
    differs = "hetpipe server: turned away 127.0.0.1: VW 1 differs from the VW that came first:"
    assert said == [f"{differs} 'launch=b' instead of 'launch=a'", f"{differs} version: '2' instead of '1'"]


@pytest.mark.parametrize("preface", [b"", PREFACE], ids=["silent", "then silent"])
def test_silent_connections_up_to_the_descriptor_limit(preface: bytes, pool: ThreadPoolExecutor) -> None:
    """The virtual workers' own connections go on; when the others are gone, new ones come in."""
    with (
        ServerProcess(f"{__name__}:limited", {"lease": PATIENCE}) as server,
        waves(server.address, server.security, pool) as training,
    ):
        before = use_of(server)
        with ExitStack() as flood:
            for _ in range(2 * DESCRIPTORS):
                connection = flood.enter_context(socket.create_connection(tuple_of(server.address), PATIENCE))
                connection.sendall(preface)
            eventually(lambda: use_of(server).descriptors >= DESCRIPTORS - 1, "the limit is not reached")
            first = training.done
            training.go_on(lambda: training.done == first + 20)
        eventually(lambda: use_of(server).descriptors <= before.descriptors, "descriptors stay")
        with closing(GrpcChannel(server.address, server.security)) as channel:
            eventually(partial(answers, channel), "nobody new comes in")
        training.go_on(lambda: True)


def test_who_connects_and_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It held a descriptor for two minutes."""
    monkeypatch.setattr(grpc_server, "HANDSHAKE", 0.2)
    with GrpcServer(Desk()) as server, socket.create_connection(tuple_of(server.address), PATIENCE) as silent:
        while silent.recv(4096):  # the server's settings
            pass


def answers(channel: GrpcChannel) -> bool:
    try:
        return SESSION.encode() in channel.call(STATUS, b"", timeout=PATIENCE)
    except Unreachable:  # it takes further connections a second after it could not
        return False


def security_in(folder: Path, ca: Path | None = None) -> Security:
    of_folder, certificate, key = (str(folder / name) for name in ("ca.pem", "certificate.pem", "key.pem"))
    return Security(str(ca or of_folder), certificate, key, token="a-token")


def knock(address: str, shown: Security | None, count: int) -> None:
    """Connects with the certificate of ``shown``, or none, so many times, and calls something."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if shown is not None:
        context.load_cert_chain(str(shown.certificate), shown.key)
    for _ in range(count):
        heard = b""
        with (
            suppress(OSError),
            socket.create_connection(tuple_of(address), PATIENCE) as raw,
            context.wrap_socket(raw) as connection,
        ):
            connection.sendall(PREFACE)
            heard = connection.recv(4096)
        assert not heard, "the server let it in"


def unencrypted(address: str, count: int) -> None:
    for _ in range(count):
        shout(address, PREFACE)


@pytest.mark.parametrize("count", [20, pytest.param(2500, marks=pytest.mark.slow)], ids=["short", "long"])
def test_wrong_and_expired_certificates(count: int, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    """From another authority, out of date, none, and no TLS at all: four times ``count``."""
    ours, expired, theirs = certificates(), tmp_path / "expired", tmp_path / "theirs"
    shutil.copytree(ours, expired)
    make(expired, days=0)
    make(theirs)
    security, no_more = security_in(ours), security_in(expired)
    with (
        ServerProcess(SESSIONS, {"lease": PATIENCE}, security=security) as server,
        waves(server.address, server.security, pool) as training,
    ):
        for shown in (no_more, security_in(theirs, ours / "ca.pem")):
            says = "does it want other certificates than security has"
            with closing(GrpcChannel(server.address, shown)) as stranger, pytest.raises(Unreachable, match=says):
                stranger.call(STATUS, b"", timeout=PATIENCE)
        before = use_of(server)
        strangers = [partial(knock, server.address, shown, count) for shown in (no_more, security_in(theirs), None)]
        training.go_on_beside([*map(pool.submit, strangers), pool.submit(unencrypted, server.address, count)])
        training.go_on(lambda: True)
        eventually(lambda: use_of(server).threads <= THREADS, "threads stay")
        eventually(lambda: use_of(server).descriptors <= before.descriptors, "descriptors stay")
