"""Messages that anybody may send to a port: they change nothing, and do not end the server."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lightning_hetpipe
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.transport import frames, grpc_channel
from lightning_hetpipe.server.transport.codec import Malformed
from lightning_hetpipe.server.transport.frames import CHUNK, Answer, Opening, Outcome
from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.grpc_import import grpc
from lightning_hetpipe.server.transport.grpc_server import MANY, ONE, SERVICE, GrpcServer
from lightning_hetpipe.server.transport.interface import HEADER_LIMIT, CallRefused, Unreachable
from lightning_hetpipe.server.transport.shared_memory import LEAST, NoBlock, Place, Views, memory, place_of
from tests.server.transports import PATIENCE, Desk, Shelf, eventually

ECHO = Opening("echo", 10, 10)
PACKED = ECHO.pack(b"ab")

# Sends the beginning of a body and waits to be killed. It takes the module of frames alone, which is quick to import.
HALF_A_BODY = """
import sys, types, threading
package = types.ModuleType("lightning_hetpipe")
package.__path__ = [sys.argv[2]]
sys.modules["lightning_hetpipe"] = package
import grpc
from lightning_hetpipe.server.transport.frames import CHUNK, Opening

def messages():
    yield Opening("echo", 10 * CHUNK, 0).pack(b"")
    yield bytes(CHUNK)
    print("sent", flush=True)
    threading.Event().wait()

for _ in grpc.insecure_channel(sys.argv[1]).stream_stream("/hetpipe/Many")(messages(), timeout=600):
    pass
"""


FORKS = """
import os, sys, threading, types
package = types.ModuleType("lightning_hetpipe")
package.__path__ = [sys.argv[1]]
sys.modules["lightning_hetpipe"] = package
from concurrent.futures import ThreadPoolExecutor
from lightning_hetpipe.server.transport.grpc_import import grpc

print([os.environ.get(name) for name in ("GRPC_ENABLE_FORK_SUPPORT", "GRPC_VERBOSITY")], flush=True)
came, go = threading.Event(), threading.Event()
def wait(message, context):
    came.set()
    go.wait(20)
    return b""
handlers = grpc.method_handlers_generic_handler("a", {"b": grpc.unary_unary_rpc_method_handler(wait)})
server = grpc.server(ThreadPoolExecutor(1), handlers=[handlers])
port = server.add_insecure_port("127.0.0.1:0")
server.start()
call = grpc.insecure_channel(f"127.0.0.1:{port}").unary_unary("/a/b").future(b"", timeout=20)
assert came.wait(20)
worker = os.fork()
if worker == 0:
    os._exit(0)
assert os.waitpid(worker, 0)[1] == 0
go.set()
call.result()
server.stop(None).wait(20)
"""

# A server, whose port it says; then a client of the port that it is told.
BOTH_SIDES = """
import sys, types
package = types.ModuleType("lightning_hetpipe")
package.__path__ = [sys.argv[1]]
sys.modules["lightning_hetpipe"] = package
from concurrent.futures import ThreadPoolExecutor
from lightning_hetpipe.server.transport.grpc_import import grpc

server = grpc.server(ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(port, flush=True)
with grpc.insecure_channel(f"127.0.0.1:{sys.stdin.readline().strip()}") as channel:
    call = channel.unary_unary("/a/b").future(b"", wait_for_ready=True)  # connects
    sys.stdin.readline()
    call.cancel()
server.stop(None).wait(20)
"""

CLIENTS_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

WITHOUT_GRPCS = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def server(desk: Desk) -> Iterator[GrpcServer]:
    with GrpcServer(desk) as server:
        yield server
        with closing(GrpcChannel(server.address)) as channel:  # whatever has happened
            assert channel.call("echo", b"ab") == b"ba"


def send(server: GrpcServer, method: str, *messages: bytes, timeout: float | None = PATIENCE) -> grpc.StatusCode:
    """Status with which a call of raw gRPC with these messages ends."""
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/{method}")(iter(messages), timeout=timeout)
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            pass
        code: grpc.StatusCode = call.code()
        return code


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"x",
        bytes(1000),
        b"\xff" * 1000,
        PACKED[:-3],
        PACKED + bytes(HEADER_LIMIT),
        b"HPT\x01" + PACKED[4:],
        PACKED[:4] + b"\x07" + PACKED[5:],
        replace(ECHO, size=-1).pack(b""),
        Answer(Outcome.REPLY).pack(b""),
        PACKED.replace(b'"place":null', b'"place":1234'),
    ],
)
def test_openings_that_are_none_are_refused(server: GrpcServer, desk: Desk, message: bytes) -> None:
    for method in (ONE, MANY):
        assert send(server, method, message) == grpc.StatusCode.INVALID_ARGUMENT
    assert desk.calls == []


def test_a_body_must_be_as_long_as_it_says(server: GrpcServer, desk: Desk) -> None:
    for chunks in ([], [bytes(9)], [bytes(9), b""], [bytes(9), bytes(2)], [bytes(11)]):
        assert send(server, MANY, PACKED, *chunks) == grpc.StatusCode.INVALID_ARGUMENT
        assert desk.abandonments.acquire(timeout=PATIENCE)
    assert desk.ran() == []
    assert send(server, MANY, PACKED, bytes(4), bytes(6)) == grpc.StatusCode.OK


def test_a_body_that_lies_elsewhere_must_be_as_long_as_it_says(server: GrpcServer, desk: Desk) -> None:
    block = memory(LEAST)
    place = place_of([block])
    assert place is not None
    for size in (LEAST - 1, LEAST + 1):
        assert send(server, MANY, Opening("echo", size, 0, place).pack(b"")) == grpc.StatusCode.INVALID_ARGUMENT
    beyond = replace(place, start=1)
    assert send(server, MANY, Opening("echo", LEAST, 0, beyond).pack(b"")) == grpc.StatusCode.OK  # that it is unseen
    assert desk.calls == []


def test_messages_that_are_too_large_and_unknown_methods_are_refused(server: GrpcServer, desk: Desk) -> None:
    too_large = bytes(CHUNK + HEADER_LIMIT + frames.OVERHEAD + 1)
    assert send(server, MANY, too_large) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert send(server, "Nothing", b"") == grpc.StatusCode.UNIMPLEMENTED
    assert desk.calls == []


def test_a_channel_that_cannot_be_closed_holds_nobody_up(server: GrpcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C had met a call just where it took one of gRPC's locks, and the program hung as it closed the channel."""
    monkeypatch.setattr(grpc_channel, "_CLOSE", 0.05)
    channel, released = GrpcChannel(server.address), threading.Event()
    close = channel._channel.close

    def stuck() -> None:
        released.wait(PATIENCE)
        close()

    monkeypatch.setattr(channel._channel, "close", stuck)
    closing_it = threading.Thread(target=channel.close)
    closing_it.start()
    closing_it.join(PATIENCE / 2)
    hung = closing_it.is_alive()
    released.set()
    assert not hung


def test_a_call_needs_a_deadline(server: GrpcServer, desk: Desk) -> None:
    """A client that sends nothing more would hold a thread for ever."""
    assert send(server, ONE, Opening("echo", 0, 0).pack(b""), timeout=None) == grpc.StatusCode.INVALID_ARGUMENT
    assert desk.calls == []


def test_who_would_wait_for_days_is_heard(server: GrpcServer) -> None:
    """HetPipeStrategy(timeout=timedelta(days=2)) was answered that a call needs a deadline."""
    with closing(GrpcChannel(server.address)) as channel:
        channel.call("echo", b"", timeout=2.0 * 24 * 3600)


def test_a_deadline_ends_a_body_that_does_not_come(server: GrpcServer, desk: Desk) -> None:
    def nothing_more() -> Iterator[bytes]:
        yield PACKED
        assert desk.abandonments.acquire(timeout=PATIENCE)

    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/{MANY}")(nothing_more(), timeout=0.3)
        with pytest.raises(grpc.RpcError):
            next(call)
        assert call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        eventually(lambda: ("abandoned", "echo", 10) in desk.calls, "the body was not given back")


def test_garbage_on_the_port_is_survived(server: GrpcServer) -> None:
    host, port = server.address.split(":")
    for garbage in (b"GET / HTTP/1.0\r\n\r\n", bytes(100_000), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000):
        with socket.create_connection((host, int(port)), PATIENCE) as connection:
            connection.sendall(garbage)


def test_connections_without_end_are_survived(server: GrpcServer) -> None:
    """More than the process may have open: further ones wait, and what works goes on working."""

    def connect() -> None:
        for _ in range(1000):
            flood.enter_context(socket.create_connection((host, int(port)), PATIENCE))

    host, port = server.address.split(":")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(GrpcChannel(server.address)) as channel, ExitStack() as flood:
        assert channel.call("echo", b"ab") == b"ba"
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                connect()
            assert channel.call("echo", b"ab", timeout=PATIENCE) == b"ba"
        finally:
            flood.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_client_that_is_killed_in_mid_body_leaves_nothing(server: GrpcServer, desk: Desk) -> None:
    folder = str(Path(lightning_hetpipe.__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", HALF_A_BODY, server.address, folder], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "sent\n"
        eventually(lambda: bool(desk.calls), "the call has not come")
        client.kill()
    assert desk.abandonments.acquire(timeout=PATIENCE)
    assert [what for what, _, _ in desk.calls] == ["open", "abandoned"]


def test_workers_may_be_forked_while_calls_run(server: GrpcServer, desk: Desk) -> None:
    """As DataLoader's are."""
    with closing(GrpcChannel(server.address)) as channel, ThreadPoolExecutor(1) as threads:
        call = threads.submit(channel.call, "hold", b"ab")
        assert desk.held.acquire(timeout=PATIENCE)
        worker = get_context("fork").Process(target=sum, args=([1, 2],))
        worker.start()
        worker.join(PATIENCE)
        assert worker.exitcode == 0
        desk.go.set()
        assert call.result(PATIENCE) == b"ba"


def test_forks_are_not_complained_about_and_the_environment_stays() -> None:
    """gRPC's core wrote to stderr at each fork, unless a variable was set when it was imported."""
    ended = subprocess.run(
        [sys.executable, "-c", FORKS, str(Path(lightning_hetpipe.__file__).parent)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=WITHOUT_GRPCS,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[None, None]\n", "")


def test_who_connects_writes_nothing_to_the_terminal() -> None:
    """Neither to a server's nor to a client's: gRPC's core logs what comes with a GOAWAY, as it comes."""
    with subprocess.Popen(
        [sys.executable, "-c", BOTH_SIDES, str(Path(lightning_hetpipe.__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=WITHOUT_GRPCS,
    ) as both:
        assert both.stdout is not None
        server = socket.create_connection(("127.0.0.1", int(both.stdout.readline())), PATIENCE)
        with server, socket.create_server(("127.0.0.1", 0)) as listener:
            shout(server, CLIENTS_PREFACE)
            assert both.stdin is not None
            both.stdin.write(f"{listener.getsockname()[1]}\n")
            both.stdin.flush()
            client, _ = listener.accept()
            with client:
                client.settimeout(PATIENCE)
                shout(client, b"")
        assert both.communicate(timeout=PATIENCE) == ("", "")
        assert both.returncode == 0


def frame(kind: int, payload: bytes) -> bytes:
    """A frame of HTTP/2, of the connection itself."""
    return len(payload).to_bytes(3) + bytes([kind, 0]) + bytes(4) + payload


def shout(peer: socket.socket, preface: bytes) -> None:
    """Sends what would be written to a terminal, and returns once the peer has read it."""
    settings, goaway, ping = 4, 7, 6
    debug = bytes(4) + (11).to_bytes(4) + b"\x1b[2JEVIL\r\n"
    peer.sendall(preface + frame(settings, b"") + 20 * frame(goaway, debug) + frame(ping, b"have you"))
    heard = b""
    while b"have you" not in heard:
        part = peer.recv(4096)
        assert part, "the connection was closed before all was read"
        heard += part


def test_a_port_is_not_shared(server: GrpcServer) -> None:
    with (
        pytest.raises(SettingError, match=f"address={server.address} cannot be had"),
        GrpcServer(Desk(), server.address),
    ):
        pass


def test_a_peer_that_speaks_another_language(server: GrpcServer) -> None:
    """Some other gRPC server, and a port where nobody speaks HTTP/2."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with closing(GrpcChannel(address)) as channel, pytest.raises(Unreachable):
            channel.call("echo", b"", timeout=0.5)
    other = grpc.method_handlers_generic_handler(
        SERVICE, {ONE: grpc.unary_unary_rpc_method_handler(lambda message, context: b"what?")}
    )
    stranger = grpc.server(ThreadPoolExecutor(1), handlers=[other])
    port = stranger.add_insecure_port("127.0.0.1:0")
    stranger.start()
    try:
        with closing(GrpcChannel(f"127.0.0.1:{port}")) as channel:
            with pytest.raises(CallRefused, match="answered with something else"):
                channel.call("echo", b"")
            with pytest.raises(CallRefused, match="Method not found"):
                channel.call("echo", b"", [memoryview(b"x")])
    finally:
        stranger.stop(None).wait(PATIENCE)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods of calls that came in many messages."""
    many, seen = GrpcServer._many, []

    def noted(server: GrpcServer, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        opening = next(messages)
        seen.append(Opening.unpack(opening)[0].method)
        return many(server, chain([opening], messages), context)

    monkeypatch.setattr(GrpcServer, "_many", noted)
    return seen


def test_what_both_sides_see_takes_one_message(streams: list[str]) -> None:
    """A stream costs two to three times as much, which virtual workers that wait for each other see in every wave."""
    shelf = Shelf(LEAST)
    with GrpcServer(shelf) as server, closing(GrpcChannel(server.address)) as channel:
        for fill in (b"a", b"b", b"c"):
            body, back = memory(LEAST), memory(LEAST)
            body[:] = fill * LEAST
            assert channel.call("write", b"", [body]) == b""
            assert channel.call("read", b"", (), [back]) == b"there"
            assert back == fill * LEAST
    assert streams == []
    assert shelf.runs == 6


def blind(views: Views, place: Place) -> memoryview:
    raise NoBlock("it is not there")


@pytest.mark.parametrize("why", ["the memory moved", "the client is blind", "it grew"])
def test_a_reply_that_does_not_fit_into_one_message_is_asked_for_again(
    streams: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(LEAST)
    with GrpcServer(shelf) as server, closing(GrpcChannel(server.address)) as channel:
        back = memory(LEAST)
        channel.call("read", b"", (), [back])
        if why == "the memory moved":
            shelf.weights = memoryview(bytearray(LEAST))
        elif why == "the client is blind":
            monkeypatch.setattr(Views, "look", blind)
        else:
            shelf.weights = memory(2 * LEAST)
            with pytest.raises(CallRefused, match="the caller room for"):
                channel.call("read", b"", (), [back])
            return
        shelf.weights[:] = b"z" * LEAST
        assert channel.call("read", b"", (), [back]) == b"there"
        assert back == b"z" * LEAST
    assert streams == ["read"]


def test_bodies_do_not_come_with_a_call_of_one_message(server: GrpcServer, desk: Desk) -> None:
    for opening in (Opening("echo", 10, 0), Opening("echo", 0, 10)):
        assert send(server, ONE, opening.pack(b"")) == grpc.StatusCode.INVALID_ARGUMENT
    assert desk.calls == []


def test_headers_have_a_limit(server: GrpcServer) -> None:
    with closing(GrpcChannel(server.address)) as channel:
        header = b"a" * HEADER_LIMIT
        assert channel.call("echo", header) == header
        with pytest.raises(ValueError, match="more than a call takes"):
            channel.call("echo", header + b"a")


PLACES = st.builds(Place, *[st.integers(0, 1 << 60)] * 4, st.text("0123456789abcdef"), *[st.integers(0, 1 << 60)] * 2)


@given(st.binary(max_size=200), st.binary(max_size=20), st.integers(0, 1 << 60), PLACES, st.booleans())
def test_openings_come_back_and_any_other_bytes_are_malformed(
    header: bytes, cut: bytes, size: int, place: Place, sees: bool
) -> None:
    opening, answer = Opening("push", size, 7, place, sees), Answer(Outcome.REPLY, size, place)
    assert Opening.unpack(opening.pack(header)) == (opening, header)
    assert Answer.unpack(answer.pack(header)) == (answer, header)
    if cut:
        with pytest.raises(Malformed):
            Opening.unpack(cut + opening.pack(header))
        with pytest.raises(Malformed):
            Answer.unpack(cut + answer.pack(header))
