"""Client side of gRPC: one channel per server, bodies in chunks or in shared memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_hetpipe.server.transport.codec import Malformed
from lightning_hetpipe.server.transport.frames import ANY_SIZE, Answer, Opening, Outcome, fill, flat, portions, total
from lightning_hetpipe.server.transport.grpc_import import grpc
from lightning_hetpipe.server.transport.grpc_server import BEARER, LIMITS, LONGEST, MANY, ONE, SERVICE, SHOWN, TOKEN
from lightning_hetpipe.server.transport.interface import RELEASE, TIMEOUT, CallRefused, Room, Unreachable
from lightning_hetpipe.server.transport.security import Security, is_loopback, printable, split
from lightning_hetpipe.server.transport.shared_memory import LEAST, NoBlock, Views, place_of

_OPTIONS = (
    *LIMITS,
    # Find a restarted server at once: the default waits up to two minutes between attempts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, the time that one attempt has for all round trips, even while weights fill the link.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),  # the protocol repeats requests
    ("grpc.enable_http_proxy", 0),  # a proxy leads out of the cluster
    ("grpc.use_local_subchannel_pool", 1),  # channels share nothing, so closing one gives its socket back
)

_CLOSE = 1.0  # seconds to wait for a channel's end, which takes milliseconds unless a lock of gRPC's is lost

_NO = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
}

_STRANGERS = {
    "CERTIFICATE_VERIFY_FAILED": "shows no certificate that security.ca has signed; give the one that signed it",
    "WRONG_VERSION_NUMBER": "does not speak TLS, and security has certificates; give it some, or leave these out",
}
"""Texts in a connection error after which a retry is useless, each with the advice to the user."""

_LOG = logging.getLogger(__name__)


class GrpcChannel:
    """`Channel` to the server at ``host:port``. It connects at the first call, and again after a server's return."""

    def __init__(self, address: str, security: Security | None = None, shared_memory: bool = True) -> None:
        """Check the arguments. ``security`` must match the server's. ``shared_memory`` is used if the server is on this
        host.

        Raises:
            SettingError: if the address is malformed or open without certificates, or if certificates cannot be read.
        """
        security = security or Security()
        security.check(address)
        self.address = address
        shown = () if security.token is None else ((TOKEN, BEARER + security.token),)
        self._metadata = ((SHOWN, RELEASE), *shown)
        self._views = Views()
        self._lock = threading.Lock()
        self._shares = shared_memory
        if security.encrypted:
            ca, certificate, key = security.read()
            credentials = grpc.ssl_channel_credentials(ca, key, certificate)
            self._channel = grpc.secure_channel(address, credentials, _OPTIONS)
        else:
            self._channel = grpc.insecure_channel(address, _OPTIONS)
        self._one = self._channel.unary_unary(f"/{SERVICE}/{ONE}")
        self._many = self._channel.stream_stream(f"/{SERVICE}/{MANY}")

    def call(
        self, method: str, header: bytes, body: Sequence[memoryview] = (), into: Room = (), timeout: float = TIMEOUT
    ) -> bytes:
        timeout = min(timeout, LONGEST / 2)  # servers refuse longer deadlines
        deadline = time.monotonic() + timeout
        room = into if callable(into) else flat(into)
        opening = Opening(method, total(body), ANY_SIZE if callable(room) else total(room))
        try:
            answer, header = self._answer(opening, header, flat(body), room, deadline)
        except grpc.RpcError as error:
            raise self._meaning(error) from None
        except Malformed as error:
            raise CallRefused(f"the server at {self.address} answered with something else: {error}") from None
        if answer.outcome is not Outcome.REPLY:
            raise CallRefused(header.decode(errors="replace"))
        return header

    def close(self) -> None:
        # Ctrl-C in a call may leave a lock of gRPC taken. Closing waits for its release.
        closing = threading.Thread(target=self._channel.close, name="hetpipe-channel-close", daemon=True)
        closing.start()
        closing.join(_CLOSE)
        self._views.close()

    def _answer(
        self, opening: Opening, header: bytes, body: list[memoryview], into: Room, deadline: float
    ) -> tuple[Answer, bytes]:
        """Return the answer with its header, after writing the reply's body ``into``."""
        place = place_of(body) if self._shares and not into else None
        accepts = self._shares and not opening.size and opening.room >= LEAST
        if (place is not None or not opening.size) and (accepts or not into):
            answer, said = self._ask(replace(opening, place=place, accepts_place=accepts), header, deadline)
            if self._took(answer, said, into):
                return answer, said
        return self._stream(opening, header, body, into, deadline)

    def _ask(self, opening: Opening, header: bytes, deadline: float) -> tuple[Answer, bytes]:
        """Make a call of one message each way."""
        message, timeout = opening.pack(header), max(0.0, deadline - time.monotonic())
        try:
            answer: bytes = self._one(message, timeout=timeout, metadata=self._metadata)
        except ValueError:
            raise Unreachable(f"the channel to {self.address} was closed") from None
        return Answer.unpack(answer)

    def _took(self, answer: Answer, said: bytes, into: Room) -> bool:
        """Copy the reply's body from its place. Return False if a place is unreadable, so that bodies need chunks."""
        if answer.outcome is Outcome.PLACE_UNREADABLE:
            self._give_up(said.decode(errors="replace"))
        if answer.outcome in (Outcome.PLACE_UNREADABLE, Outcome.REPLY_WITHOUT_PLACE):
            return False
        if answer.outcome is Outcome.REFUSED or callable(into) or not into:
            return True
        if answer.size != total(into) or answer.place is None:
            raise Malformed(f"a reply of {answer.size} bytes instead of {total(into)} in one message")
        try:
            lies = self._views.look(answer.place)
        except NoBlock as no:
            self._give_up(str(no))
            return False
        if lies.nbytes != answer.size:
            raise Malformed(f"a reply of {answer.size} bytes lies where {lies.nbytes} are")
        fill(into, iter([lies]))
        return True

    def _stream(
        self, opening: Opening, header: bytes, body: list[memoryview], into: Room, deadline: float
    ) -> tuple[Answer, bytes]:
        """Make a call whose bodies come in chunks."""
        messages = requests(opening.pack(header), body)
        try:
            replies = self._many(messages, timeout=max(0.0, deadline - time.monotonic()), metadata=self._metadata)
        except ValueError:
            raise Unreachable(f"the channel to {self.address} was closed") from None
        try:
            return received(replies, into)
        finally:
            replies.cancel()

    def _give_up(self, why: str) -> None:
        """Stop using shared memory, and log it once: as a warning for a loopback address, else at debug level."""
        with self._lock:
            before, self._shares = self._shares, False
        if before:
            level = logging.WARNING if is_loopback(split(self.address)[0]) else logging.DEBUG
            _LOG.log(
                level,
                "hetpipe: weights go to the server at %s by gRPC, which is slower than shared memory: %s",
                self.address,
                why,
            )

    def _meaning(self, error: grpc.RpcError) -> CallRefused | Unreachable:
        code, details = error.code(), str(error.details())
        for sign, sentence in _STRANGERS.items():
            if sign in details:
                return CallRefused(f"the server at {self.address} {sentence}")
        details = printable(details)  # from a server that may not be ours
        if code in _NO:
            return CallRefused(f"the server at {self.address} refused the call: {details}")
        hint = "; does it want other certificates than security has?" if "Socket closed" in details else ""
        return Unreachable(f"the server at {self.address} cannot be reached ({code.name.lower()}: {details}){hint}")


def requests(opening: bytes, body: Sequence[memoryview]) -> Iterator[bytes]:
    """Yield the messages of a call. A thread of gRPC iterates."""
    yield opening
    yield from portions(body)


def received(replies: Iterator[bytes], into: Room) -> tuple[Answer, bytes]:
    """Read the answer with its header, and write the reply's body ``into``. Only the end of ``replies`` shows that all
    is well. Raise Malformed if there is no answer, or its body has another size."""
    answer, header = Answer.unpack(next(replies, b""))
    if answer.outcome is Outcome.REPLY:
        room = flat(into(answer.size)) if callable(into) else into
        if answer.size != total(room) or answer.place is not None:
            raise Malformed(f"a reply of {answer.size} bytes instead of {total(room)}")
        if fill(room, replies):
            raise Malformed("the reply's body is cut off, or longer than it says")
    for _ in replies:
        raise Malformed("more came than the reply's body")
    return answer, header
