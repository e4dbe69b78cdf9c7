"""The client's side of gRPC: one channel per server, bodies in chunks, or in a block that both sides have mapped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

from lightning_hetpipe.server.buffers import Filling, flat, portions, total
from lightning_hetpipe.server.frames import CHUNK, SIGNAL, Answer, Malformed, Opening, Outcome
from lightning_hetpipe.server.grpc_import import grpc
from lightning_hetpipe.server.grpc_server import BEARER, LIMITS, MANY, ONE, SERVICE, TOKEN
from lightning_hetpipe.server.security import Security, is_loopback, split
from lightning_hetpipe.server.shared_memory import SLOT, SLOTS, Block, NoBlock
from lightning_hetpipe.server.transport import TIMEOUT, Refused, Unreachable

LEAST = 1 << 18
"""Bytes of both bodies together from which a block is worth the detour."""

_IDLE_BLOCKS = 2  # kept for the next call; more are made while more calls run at once

_OPTIONS = (
    *LIMITS,
    # A server that comes back is to be found at once: the default waits up to two minutes between attempts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),  # to try again is the protocol's affair
    ("grpc.enable_http_proxy", 0),  # what http_proxy names leads out of the cluster
    ("grpc.use_local_subchannel_pool", 1),  # channels share nothing, so closing one gives its socket back
)

_NO = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
}

_STRANGERS = {
    "CERTIFICATE_VERIFY_FAILED": "shows no certificate that security.ca has signed; give the one that signed it",
    "WRONG_VERSION_NUMBER": "does not speak TLS, and security has certificates; give it some, or leave these out",
}
"""What a connection that fails says where trying again changes nothing."""

_LOG = logging.getLogger(__name__)


class GrpcChannel:
    """A `Channel` to the server at ``host:port``. Connects at the first call, and again when the server is back."""

    def __init__(self, address: str, security: Security | None = None, shared_memory: bool = True) -> None:
        """Checks; connects at the first call.

        Args:
            address: the server's.
            security: certificates and token, as the server has them.
            shared_memory: whether bodies may go through shared memory, where the server turns out to be on this host.

        Raises:
            SettingError: if the address is malformed, or open without certificates, or they cannot be read.
        """
        security = security or Security()
        security.check(address)
        self.address = address
        self._metadata = () if security.token is None else ((TOKEN, BEARER + security.token),)
        self._blocks = _Blocks(address) if shared_memory else None
        if security.encrypted:
            ca, certificate, key = security.read()
            credentials = grpc.ssl_channel_credentials(ca, key, certificate)
            self._channel = grpc.secure_channel(address, credentials, _OPTIONS)
        else:
            self._channel = grpc.insecure_channel(address, _OPTIONS)
        self._one = self._channel.unary_unary(f"/{SERVICE}/{ONE}")
        self._many = self._channel.stream_stream(f"/{SERVICE}/{MANY}")

    def call(
        self,
        method: str,
        header: bytes,
        body: Sequence[memoryview] = (),
        into: Sequence[memoryview] = (),
        timeout: float = TIMEOUT,
    ) -> bytes:
        """As `Channel.call` says."""
        deadline = time.monotonic() + timeout
        opening = Opening(method, header, total(body), total(into))
        message = opening.pack()
        try:
            if not opening.size and not opening.room:
                answer = Answer.unpack(self._ask(message, timeout))
            else:
                answer = self._with_bodies(opening, flat(body), flat(into), deadline)
        except grpc.RpcError as error:
            raise self._meaning(error) from None
        except Malformed as error:
            raise Refused(f"the server at {self.address} answered with something else: {error}") from None
        if answer.outcome != Outcome.REPLY:
            raise Refused(answer.header.decode(errors="replace"))
        return answer.header

    def close(self) -> None:
        """Ends the calls that are under way as `Unreachable`, and gives everything back. May be called again."""
        self._channel.close()
        if self._blocks is not None:
            self._blocks.close()

    def _ask(self, message: bytes, timeout: float) -> bytes:
        try:
            answer: bytes = self._one(message, timeout=timeout, metadata=self._metadata)
        except ValueError:
            raise Unreachable(f"the channel to {self.address} was closed") from None
        return answer

    def _with_bodies(self, opening: Opening, body: list[memoryview], into: list[memoryview], deadline: float) -> Answer:
        blocks = self._blocks
        block = blocks.take() if blocks is not None and opening.size + opening.room >= LEAST else None
        if blocks is not None and block is not None:
            outcome = None
            try:
                answer = self._run(_SlotExchange(opening, body, into, block), deadline)
                outcome = answer.outcome
            finally:
                if outcome == Outcome.REPLY:
                    blocks.give(block)
                else:  # after an error, or a refusal half-way, somebody may still be filling it
                    block.close()
            if outcome != Outcome.NO_BLOCK:
                return answer
            blocks.give_up(answer.header.decode(errors="replace"))
        return self._run(_MessageExchange(opening, body, into), deadline)

    def _run(self, exchange: _MessageExchange | _SlotExchange, deadline: float) -> Answer:
        try:
            replies = self._many(
                exchange.requests(), timeout=max(0.0, deadline - time.monotonic()), metadata=self._metadata
            )
        except ValueError:
            raise Unreachable(f"the channel to {self.address} was closed") from None
        try:
            answer = exchange.take(replies)
            for _ in replies:  # nothing: to the end, as only that says that all is well
                raise Malformed("more came than the reply's body")
            return answer
        finally:
            exchange.end()
            replies.cancel()

    def _meaning(self, error: grpc.RpcError) -> Refused | Unreachable:
        code, details = error.code(), str(error.details())
        for sign, sentence in _STRANGERS.items():
            if sign in details:
                return Refused(f"the server at {self.address} {sentence}")
        if code in _NO:
            return Refused(f"the server at {self.address} refused the call: {details}")
        hint = "; does it want other certificates than security has?" if "Socket closed" in details else ""
        return Unreachable(f"the server at {self.address} cannot be reached ({code.name.lower()}: {details}){hint}")


class _MessageExchange:
    """One call whose bodies are chunks in messages."""

    def __init__(self, opening: Opening, body: list[memoryview], into: list[memoryview]) -> None:
        self._opening, self._body, self._into = opening, body, into

    def requests(self) -> Iterator[bytes]:
        """What to send; runs in a thread of gRPC's."""
        yield self._opening.pack()
        for portion in portions(self._body, CHUNK):
            yield b"".join(portion)

    def take(self, replies: Iterator[bytes]) -> Answer:
        """Reads the answer and the reply's body."""
        answer = _answer(replies, self._opening)
        if answer.outcome == Outcome.REPLY:
            filling = Filling(self._into)
            while filling.left:
                chunk = next(replies, b"")
                if not chunk or len(chunk) > filling.left:
                    raise Malformed("the reply's body is cut off, or longer than it says")
                filling.write(chunk)
        return answer

    def end(self) -> None:
        pass


class _SlotExchange:
    """One call whose bodies go through a block."""

    def __init__(self, opening: Opening, body: list[memoryview], into: list[memoryview], block: Block) -> None:
        self._opening = Opening(*opening[:4], block.description)
        self._body, self._into, self._block = body, into, block
        self._emptied: SimpleQueue[bool] = SimpleQueue()  # a slot, by either side; False: the call is over
        self._slots = -(-opening.size // SLOT)

    def requests(self) -> Iterator[bytes]:
        yield self._opening.pack()
        for index, portion in enumerate(portions(self._body, SLOT)):
            if index >= SLOTS and not self._emptied.get():
                return
            try:
                self._block.fill(index, portion)
            except ValueError:  # it has been closed, as the call is over
                return
            yield SIGNAL
        for _ in range(min(SLOTS, self._slots)):  # the server's signals for the last ones
            if not self._emptied.get():
                return
        while self._emptied.get():
            yield SIGNAL

    def take(self, replies: Iterator[bytes]) -> Answer:
        for _ in range(self._slots):
            message = next(replies, b"")
            if message != SIGNAL:
                return _checked(Answer.unpack(message), self._opening)
            self._emptied.put(True)
        answer = _answer(replies, self._opening)
        if answer.outcome == Outcome.REPLY:
            filling = Filling(self._into)
            for index in range(-(-self._opening.room // SLOT)):
                if next(replies, b"") != SIGNAL:
                    raise Malformed("something else came where a slot's signal was expected")
                filling.write(self._block.slot(index, min(SLOT, filling.left)))
                self._emptied.put(True)
        return answer

    def end(self) -> None:
        self._emptied.put(False)


class _Blocks:
    """The blocks of a channel: made when first needed, used again, given up for good where the server sees none."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._idle: list[Block] = []
        self._usable = True

    def take(self) -> Block | None:
        """A block that nobody else uses, or None where there is to be none."""
        with self._lock:
            if self._idle or not self._usable:
                return self._idle.pop() if self._usable else None
        try:
            return Block.make()
        except NoBlock as no:
            self.give_up(str(no))
            return None

    def give(self, block: Block) -> None:
        with self._lock:
            if self._usable and len(self._idle) < _IDLE_BLOCKS:
                self._idle.append(block)
                return
        block.close()

    def give_up(self, why: str) -> None:
        """Says so once; loudly only where it is a surprise: elsewhere the server is simply on another host."""
        with self._lock:
            if not self._usable:
                return
        self.close()
        level = logging.WARNING if is_loopback(split(self._address)[0]) else logging.DEBUG
        _LOG.log(
            level,
            "hetpipe: weights go to the server at %s by gRPC, which is slower than shared memory: %s",
            self._address,
            why,
        )

    def close(self) -> None:
        with self._lock:
            self._usable = False
            idle, self._idle = self._idle, []
        for block in idle:
            block.close()


def _answer(replies: Iterator[bytes], opening: Opening) -> Answer:
    message = next(replies, None)
    if message is None:
        raise Malformed("nothing")
    return _checked(Answer.unpack(message), opening)


def _checked(answer: Answer, opening: Opening) -> Answer:
    if answer.outcome == Outcome.REPLY and answer.size != opening.room:
        raise Malformed(f"a reply of {answer.size} bytes instead of {opening.room}")
    return answer
