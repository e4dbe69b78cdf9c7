"""A storm of hostile messages, from several callers at once, on a server at which virtual workers train.

What is replayed, reordered and truncated is what the virtual workers themselves have sent: a `Tap` between them and the
server has it, token included.
"""

from __future__ import annotations

import itertools
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import Any, Self

from lightning_hetpipe.server.process.sessions import COORDINATOR_METHOD, SHARD_METHOD
from lightning_hetpipe.server.protocol.messages import (
    Join,
    Leave,
    Report,
    Request,
    encode,
)
from lightning_hetpipe.server.transport.frames import Opening
from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.grpc_import import grpc
from lightning_hetpipe.server.transport.grpc_server import BEARER, MANY, ONE, SERVICE, SHOWN, TOKEN
from lightning_hetpipe.server.transport.interface import RELEASE, STATUS, CallRefused, Unreachable
from lightning_hetpipe.server.transport.security import EVERY, Security
from tests.server.strangers import GARBAGE, OTHERS, bodies, messages
from tests.server.transports import PATIENCE

CALLERS = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PING = b"\0\0\x08\x06" + bytes(5) + b"have you"
OLD = "0.0.9"
"""Another release."""
GROWTH = 24 << 20
"""Bytes by which a server's memory may grow after a warm-up: gRPC keeps some of the buffers it has once used."""
FEW_ARENAS = ("MALLOC_ARENA_MAX", "1")
"""A variable for servers whose memory is measured: glibc's arenas, of threads, fill for a long time."""
KEPT = 1 << 18
"""Bytes of a connection that are recorded."""


class Tap:
    """Passes on what comes to ``address`` to the server at ``to``, and keeps the beginning of each connection."""

    def __init__(self, to: str) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._records: list[bytearray] = []
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listener, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
        for each in (self._listener, *self._open):
            each.close()

    def recorded(self) -> list[bytes]:
        """Bytes that each connection has sent so far."""
        return [bytes(each) for each in self._records if len(each) > len(PREFACE) + 100]

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, name="test-tap", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
                server = socket.create_connection(tuple_of(self._to), PATIENCE)
            except OSError:
                return
            server.settimeout(None)
            self._records.append(record := bytearray())
            self._open += [caller, server]
            self._start(self._pass, caller, server, record)
            self._start(self._pass, server, caller, None)

    def _pass(self, source: socket.socket, to: socket.socket, record: bytearray | None) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if record is not None and len(record) < KEPT:
                    record += data
                to.sendall(data)
        with suppress(OSError):
            to.shutdown(socket.SHUT_WR)


class Storm:
    """Hostile messages to the session at ``address``, from `CALLERS` threads.

    Args:
        recorded: Gives what virtual workers have sent.
    """

    def __init__(self, address: str, security: Security, session: str, recorded: Callable[[], list[bytes]]) -> None:
        self.address, self.security, self.session, self.recorded = address, security, session, recorded
        self.sent = 0
        self.may_end = threading.Event()
        """Until this is set, callers go on also when they have sent all that they were to."""
        self.may_end.set()
        self._lock = threading.Lock()

    def blow(self, count: int, pool: ThreadPoolExecutor) -> list[Future[None]]:
        """Sends ``count`` messages in threads of ``pool``, or more until it `may_end`."""
        return [pool.submit(self._caller, seed, count // CALLERS) for seed in range(CALLERS)]

    def _caller(self, seed: int, count: int) -> None:
        chance = random.Random(seed)
        with ExitStack() as stack:
            known = stack.enter_context(closing(GrpcChannel(self.address, self.security)))
            nobody = stack.enter_context(closing(GrpcChannel(self.address)))
            wrong = stack.enter_context(closing(GrpcChannel(self.address, replace(self.security, token="wrong"))))
            raw = stack.enter_context(grpc.insecure_channel(self.address))
            status = json.loads(known.call(STATUS, b"", timeout=PATIENCE))[self.session]
            member = status["members"][0]
            where = status["generation"], member["clock"]
            senseless = [*messages(*where)]
            oversize = [*bodies(self.session, *where), *bodies(self.session, *where, member["incarnation"])]
            kinds: list[Callable[[], None]] = [
                lambda: shout(self.address, chance.choice([chance.randbytes(chance.randrange(1, 4000)), *GARBAGE])),
                lambda: shout(self.address, PREFACE + chance.randbytes(chance.randrange(1, 4000))),
                lambda: self._senseless(known, chance.choice(senseless), chance),
                lambda: self._by_hand(raw, chance.choice(oversize), chance.choice((ONE, MANY, "Nothing"))),
                lambda: shout(self.address, b"".join(frames(chance.choice(self.recorded()))) + PING),
                lambda: self._truncated(chance),
                lambda: shout(self.address, shuffled(chance.choice(self.recorded()), chance) + PING),
                lambda: self._unheard(nobody, chance),
                lambda: self._unheard(wrong, chance),
                lambda: self._by_hand(raw, [Opening(STATUS, 0, 0).pack(b"")], ONE, ((SHOWN, OLD),)),
            ]
            if seed == 0:  # each of whose reasons is to be in the log, whatever chance brings
                self._differs(known)
            for number in itertools.count():
                if number >= count and self.may_end.is_set():
                    return
                kinds[number % len(kinds)]()
                with self._lock:
                    self.sent += 1

    def _differs(self, channel: GrpcChannel) -> None:
        """Another program's virtual worker 0."""
        header = encode(Join(0, 1 << 62, 1, OTHERS, Report(), ("",)))
        with suppress(CallRefused, Unreachable):
            channel.call(f"{self.session}/{COORDINATOR_METHOD}", header, timeout=PATIENCE)

    def _truncated(self, chance: random.Random) -> None:
        """A connection that ends in the midst of a frame."""
        whole = chance.choice(self.recorded())
        with suppress(OSError), socket.create_connection(tuple_of(self.address), PATIENCE) as connection:
            connection.sendall(whole[: chance.randrange(1, len(whole))])

    def _senseless(self, channel: GrpcChannel, sent: tuple[Any, bytes], chance: random.Random) -> None:
        message, body = sent
        header = encode(message)
        method = COORDINATOR_METHOD if isinstance(message, Request) else SHARD_METHOD
        header = chance.choice([header, header[: chance.randrange(len(header))], b"\xff" + header])
        with suppress(CallRefused, Unreachable):
            channel.call(f"{self.session}/{method}", header, [memoryview(body)], timeout=PATIENCE)

    def _by_hand(self, channel: Any, body: list[bytes], method: str, more: tuple[tuple[str, str], ...] = ()) -> None:
        metadata = ((TOKEN, f"{BEARER}{self.security.token}"), *more)
        call = channel.stream_stream(f"/{SERVICE}/{method}")(iter(body), timeout=PATIENCE, metadata=metadata)
        with suppress(grpc.RpcError):
            list(call)

    def _unheard(self, channel: GrpcChannel, chance: random.Random) -> None:
        header = encode(Leave(chance.randrange(2), 1 << 62, "ValueError: a stranger's"))
        with suppress(CallRefused, Unreachable):
            channel.call(f"{self.session}/{COORDINATOR_METHOD}", header, timeout=PATIENCE)


def shout(address: str, data: bytes) -> None:
    """Returns once the server has read all of it, or closed the connection, or answers nothing for a moment."""
    with suppress(OSError), socket.create_connection(tuple_of(address), PATIENCE) as connection:
        connection.settimeout(0.2)
        connection.sendall(data)
        heard = b""
        while PING[-8:] not in heard and (part := connection.recv(1 << 16)):
            heard = heard[-8:] + part


def frames(recorded: bytes) -> Iterator[bytes]:
    """The preface of a connection, and each whole frame that follows."""
    yield recorded[: len(PREFACE)]
    start = len(PREFACE)
    while start + 9 <= len(recorded):
        end = start + 9 + int.from_bytes(recorded[start : start + 3])
        if end > len(recorded):
            return
        yield recorded[start:end]
        start = end


def shuffled(recorded: bytes, chance: random.Random) -> bytes:
    """A connection whose frames come in another order, but for the first one, without which all is refused."""
    preface, first, *others = frames(recorded)
    chance.shuffle(others)
    return b"".join((preface, first, *others))


def tuple_of(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


REASONS = (
    "it shows no token; HETPIPE_TOKEN must be the same everywhere",
    "it shows a wrong token; HETPIPE_TOKEN must be the same everywhere",
    f"it is of lightning-hetpipe {OLD}, and the server of {RELEASE}",
    "VW 0 differs from the VW that came first: ",
)


def check_log(said: str, seconds: float) -> None:
    """The server has said whom it turned away and why, each once in a minute; the storm took so many ``seconds``."""
    lines = [line.partition(" (since the last")[0] for line in said.splitlines() if "hetpipe server" in line]
    assert max(Counter(lines).values()) <= 1 + seconds // EVERY, lines
    for why in REASONS:
        assert any(line.startswith(f"hetpipe server: turned away 127.0.0.1: {why}") for line in lines), (why, lines)
