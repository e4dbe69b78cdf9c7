"""The client's side of gRPC: one channel per server, bodies in chunks, or read where they lie."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from lightning_hetpipe.server.process.rejections import printable
from lightning_hetpipe.server.transport.body_buffers import Filling, flat, portions, total
from lightning_hetpipe.server.transport.frames import CHUNK, READ, UNSEEN, Answer, Malformed, Opening, Outcome
from lightning_hetpipe.server.transport.grpc_import import grpc
from lightning_hetpipe.server.transport.grpc_server import BEARER, LIMITS, LONGEST, MANY, ONE, SERVICE, TOKEN
from lightning_hetpipe.server.transport.interface import TIMEOUT, CallRefused, Unreachable
from lightning_hetpipe.server.transport.security import Security, is_loopback, split
from lightning_hetpipe.server.transport.shared_memory import NoBlock, Place, Views, place_of

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

_CLOSE = 1.0  # seconds to wait for a channel's end, which takes milliseconds unless a lock of gRPC's is lost

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
            shared_memory: whether bodies in shared memory may be read where they lie, if the server turns out to be on
                this host.

        Raises:
            SettingError: if the address is malformed, or open without certificates, or they cannot be read.
        """
        security = security or Security()
        security.check(address)
        self.address = address
        self._metadata = () if security.token is None else ((TOKEN, BEARER + security.token),)
        self._views = Views()
        self._lock = threading.Lock()
        self._shares = shared_memory
        self._seen = False  # whether the body of a reply has been read where it lay
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
        timeout = min(timeout, LONGEST / 2)  # servers hear nobody who may stay for longer than they let anybody
        deadline = time.monotonic() + timeout
        opening = Opening(method, header, total(body), total(into))
        try:
            if not opening.size and not opening.room:
                answer = self._ask(opening, deadline)
            else:
                answer = self._with_bodies(opening, flat(body), flat(into), deadline)
        except grpc.RpcError as error:
            raise self._meaning(error) from None
        except Malformed as error:
            raise CallRefused(f"the server at {self.address} answered with something else: {error}") from None
        if answer.outcome != Outcome.REPLY:
            raise CallRefused(answer.header.decode(errors="replace"))
        return answer.header

    def close(self) -> None:
        """Ends the calls that are under way as `Unreachable`, and gives everything back. May be called again."""
        # A call that Ctrl-C has interrupted may have left a lock of gRPC's taken, for whose release closing waits.
        closing = threading.Thread(target=self._channel.close, name="hetpipe-channel-close", daemon=True)
        closing.start()
        closing.join(_CLOSE)
        self._views.close()

    def _ask(self, opening: Opening, deadline: float) -> Answer:
        message, timeout = opening.pack(), max(0.0, deadline - time.monotonic())
        try:
            answer: bytes = self._one(message, timeout=timeout, metadata=self._metadata)
        except ValueError:
            raise Unreachable(f"the channel to {self.address} was closed") from None
        return Answer.unpack(answer)

    def _with_bodies(self, opening: Opening, body: list[memoryview], into: list[memoryview], deadline: float) -> Answer:
        place = place_of(body) if self._shares else None
        if place is not None:
            placed = opening._replace(place=place.pack())
            answer = self._run(placed, [], into, deadline) if opening.room else self._ask(placed, deadline)
            if answer.outcome != Outcome.UNSEEN:
                return answer
            self._give_up(answer.header.decode(errors="replace"))
        elif not opening.size and self._shares and self._seen:
            answer = self._ask(opening._replace(sees=True), deadline)
            if answer.outcome != Outcome.UNPLACED and self._filled(answer, into):
                return answer
        return self._run(opening, body, into, deadline)

    def _filled(self, answer: Answer, into: list[memoryview]) -> bool:
        """Whether the reply's body, if it has any, was seen where it lies, and is where it was wanted."""
        if answer.outcome != Outcome.REPLY:
            return True
        if answer.size != total(into) or not answer.place:
            raise Malformed(f"a reply of {answer.size} bytes instead of {total(into)} in one message")
        lies = self._look(answer.place)
        if lies is None:
            return False
        _copy_seen(lies, answer.size, Filling(into))
        return True

    def _run(self, opening: Opening, body: list[memoryview], into: list[memoryview], deadline: float) -> Answer:
        sees = self._shares and opening.room > 0
        exchange = _Exchange(opening._replace(sees=sees), body, into, self._look)
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

    def _look(self, place: bytes) -> memoryview | None:
        try:
            lies = self._views.look(Place.unpack(place))
        except NoBlock as no:
            self._give_up(str(no))
            return None
        self._seen = True
        return lies

    def _give_up(self, why: str) -> None:
        """Says so once; loudly only where it is a surprise: elsewhere the server is simply on another host."""
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
        details = printable(details)  # of a server that may not be ours
        if code in _NO:
            return CallRefused(f"the server at {self.address} refused the call: {details}")
        hint = "; does it want other certificates than security has?" if "Socket closed" in details else ""
        return Unreachable(f"the server at {self.address} cannot be reached ({code.name.lower()}: {details}){hint}")


def _copy_seen(lies: memoryview, size: int, into: Filling) -> None:
    """Copies the body of a reply from where it lies. Raises Malformed if it is not ``size`` bytes."""
    if lies.nbytes != size:
        raise Malformed(f"a reply of {size} bytes lies where {lies.nbytes} are")
    into.write(lies)


class _Exchange:
    """One call with bodies: what to send, and what to make of what comes."""

    def __init__(
        self,
        opening: Opening,
        body: list[memoryview],
        into: list[memoryview],
        look: Callable[[bytes], memoryview | None],
    ) -> None:
        self._opening, self._body, self._into, self._look = opening, body, into, look
        self._word: SimpleQueue[bytes] = SimpleQueue()  # what to say of the reply's body; empty: nothing any more

    def requests(self) -> Iterator[bytes]:
        """What to send; runs in a thread of gRPC's."""
        yield self._opening.pack()
        for portion in portions(self._body, CHUNK):
            yield b"".join(portion)
        if self._opening.sees and (word := self._word.get()):
            yield word

    def take(self, replies: Iterator[bytes]) -> Answer:
        """Reads the answer and the reply's body."""
        message = next(replies, None)
        if message is None:
            raise Malformed("nothing")
        answer = Answer.unpack(message)
        if answer.outcome != Outcome.REPLY:
            return answer
        if answer.size != self._opening.room:
            raise Malformed(f"a reply of {answer.size} bytes instead of {self._opening.room}")
        filling = Filling(self._into)
        if answer.place:
            lies = self._look(answer.place)
            if lies is not None:
                _copy_seen(lies, answer.size, filling)
            self._word.put(UNSEEN if lies is None else READ)
        while filling.left:
            chunk = next(replies, b"")
            if not chunk or len(chunk) > filling.left:
                raise Malformed("the reply's body is cut off, or longer than it says")
            filling.write(chunk)
        return answer

    def end(self) -> None:
        """The call is over."""
        self._word.put(b"")
