"""A handler behind gRPC: generic methods with bytes, bodies in chunks or where they lie, TLS and a token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.process.rejections import Rejections
from lightning_hetpipe.server.transport.body_buffers import Filling, copy, flat, portions, total
from lightning_hetpipe.server.transport.frames import CHUNK, OVERHEAD, READ, UNSEEN, Answer, Malformed, Opening, Outcome
from lightning_hetpipe.server.transport.grpc_import import grpc
from lightning_hetpipe.server.transport.interface import HEADER_LIMIT, CallRefused, Handler, Reply
from lightning_hetpipe.server.transport.security import Security, split
from lightning_hetpipe.server.transport.shared_memory import NoBlock, Place, Views, place_of

SERVICE = "hetpipe"
ONE = "One"
"""gRPC's method for calls whose bodies, if they have any, lie where the other side sees them: one message each way."""
MANY = "Many"
"""gRPC's method for calls with bodies; it takes the time of two or three of the other."""
TOKEN = "authorization"
BEARER = "Bearer "

CALLS = 256
"""Calls that a server serves at once, each in a thread of its own; it turns further ones away."""

LONGEST = 24 * 3600.0
"""Seconds that a call may take: who sends nothing more must not hold a thread for ever."""

_STOP = 10.0  # seconds that threads may take to notice that their calls have ended

LIMITS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", CHUNK + HEADER_LIMIT + OVERHEAD),
    # Larger frames and reads: fewer pieces to put together. Measured: a quarter less of CPU time.
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    ("grpc.experimental.tcp_read_chunk_size", 1 << 20),
    ("grpc.experimental.tcp_max_read_chunk_size", 4 << 20),
    # A machine that vanished closes no connection: it is missed by the answer to a ping.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)

_LOG = logging.getLogger(__name__)


class GrpcServer:
    """A `Server` at ``host:port``; port 0 takes any free one."""

    def __init__(
        self, handler: Handler, address: str = "127.0.0.1:0", security: Security | None = None, calls: int = CALLS
    ) -> None:
        """Checks only; entering the context takes the port.

        Args:
            handler: serves the calls.
            address: where to listen.
            security: certificates and token; the default has none, and so only loopback addresses.
            calls: how many to serve at once. One that waits in ``run`` counts.

        Raises:
            SettingError: if the address is malformed, or open without certificates.
        """
        self._security = security or Security()
        self._security.check(address)
        self._host, self._port = address.rpartition(":")[0], split(address)[1]
        self._handler = handler
        self._calls = calls
        self._rejections = Rejections()
        self._views = Views()
        self._threads: ThreadPoolExecutor | None = None
        self._server: grpc.Server | None = None

    @property
    def address(self) -> str:
        """``host:port``, with the port that it got."""
        return f"{self._host}:{self._port}"

    def __enter__(self) -> Self:
        """Listens and serves.

        Raises:
            SettingError: if the address cannot be had, or the certificates cannot be used.
        """
        credentials = self._credentials()
        options = (
            *LIMITS,
            ("grpc.so_reuseport", 0),  # or two servers would share a port, and its calls, without a word
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
        )
        self._threads = ThreadPoolExecutor(self._calls, thread_name_prefix="hetpipe-server")
        server = grpc.server(
            self._threads,
            interceptors=(_Doorkeeper(self._security, self._rejections),),
            options=options,
            maximum_concurrent_rpcs=self._calls,
        )
        handlers = {
            ONE: grpc.unary_unary_rpc_method_handler(self._one),
            MANY: grpc.stream_stream_rpc_method_handler(self._many),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            if credentials is None:
                self._port = server.add_insecure_port(self.address)
            else:
                self._port = server.add_secure_port(self.address, credentials)
        except RuntimeError:
            self._threads.shutdown()
            raise SettingError(
                f"address={self.address} cannot be had: another program has the port, or no network of this machine has"
                " the host; give another, with port 0 for any free one."
            ) from None
        server.start()
        self._server = server
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the calls under way and gives the port back; waits for the threads that are not held in the handler."""
        server, self._server = self._server, None
        if server is None or self._threads is None:
            return
        server.stop(None).wait(_STOP)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._views.close()

    def _credentials(self) -> grpc.ServerCredentials | None:
        if not self._security.encrypted:
            return None
        ca, certificate, key = self._security.read()
        return grpc.ssl_server_credentials([(key, certificate)], root_certificates=ca, require_client_auth=True)

    def _one(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        opening = self._opening(message, context)
        if bool(opening.size) != bool(opening.place) or (opening.room and not opening.sees):
            _malformed(context, "a body cannot come in a call of one message, it can only lie somewhere")
        try:
            offered = self._offered(opening)
            return next(self._answers(opening, offered, None, context), b"")
        except NoBlock as no:
            return Answer(Outcome.UNSEEN, str(no).encode()).pack()
        except Malformed as error:
            _malformed(context, str(error))

    def _many(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        opening = self._opening(next(messages, b""), context)
        try:
            offered = self._offered(opening)
            yield from self._answers(opening, offered, messages, context)
        except NoBlock as no:
            yield Answer(Outcome.UNSEEN, str(no).encode()).pack()
        except Malformed as error:
            _malformed(context, str(error))

    def _opening(self, message: bytes, context: grpc.ServicerContext) -> Opening:
        why = f"a call needs a deadline of at most {LONGEST:.0f} s" if context.time_remaining() > LONGEST else ""
        try:
            opening = Opening.unpack(message)
        except Malformed as error:
            why = str(error)
        if why:
            self._rejections.note(context.peer(), why)
            _malformed(context, why)
        return opening

    def _offered(self, opening: Opening) -> memoryview | None:
        """The body where it lies; None if it comes in messages, or there is none. Raises NoBlock."""
        if opening.place:
            return self._views.look(Place.unpack(opening.place))
        self._views.drop()
        return None

    def _answers(
        self,
        opening: Opening,
        offered: memoryview | None,
        messages: Iterator[bytes] | None,
        context: grpc.ServicerContext,
    ) -> Iterator[bytes]:
        """What to answer; ``messages``, which follow the opening, are None where it is all, and so is the answer."""
        method, header, size = opening.method, opening.header, opening.size
        if offered is not None and offered.nbytes != size:
            raise Malformed(f"a body of {size} bytes lies where {offered.nbytes} are")
        try:
            body = self._handler.open(method, header, size, offered)
        except Exception as error:
            yield _no(error, method)
            return
        whole = False
        try:
            if body.nbytes != size:
                raise ValueError(f"the handler opened {body.nbytes} bytes for {size}")
            if offered is None:
                _receive(messages or iter(()), flat([body]), size)
            elif body is not offered:
                copy(body, offered)
            whole = context.is_active()
        finally:
            if not whole:
                _guarded(lambda: self._handler.abandoned(method, header, body), method)
        if not whole:
            return
        try:
            reply = self._handler.run(method, header, body)
        except Exception as error:
            yield _no(error, method)
            return
        if reply.rejected:
            self._rejections.note(context.peer(), reply.rejected)
        try:
            yield from _reply(reply, opening, messages)
        finally:  # also where the caller is gone: then this generator is closed
            if reply.done is not None:
                _guarded(reply.done, method)


def _receive(messages: Iterator[bytes], into: list[memoryview], size: int) -> None:
    filling = Filling(into)
    while filling.left:
        chunk = next(messages, b"")
        if not chunk or len(chunk) > filling.left:
            raise Malformed(f"a body of {size} bytes ended, or went on, {filling.left} bytes before its end")
        filling.write(chunk)


def _reply(reply: Reply, opening: Opening, messages: Iterator[bytes] | None) -> Iterator[bytes]:
    body = flat(reply.body)
    size = total(body)
    if size != opening.room:
        yield _misfit(size, opening.room).pack()
        return
    place = place_of(body) if opening.sees else None
    # In one message nobody will say when the body has been read, so it must not matter.
    if messages is None and size and (place is None or reply.done is not None):
        yield Answer(Outcome.UNPLACED, b"the reply's body lies where only its server sees it").pack()
        return
    yield Answer(Outcome.REPLY, reply.header, size, b"" if place is None else place.pack()).pack()
    if messages is None:
        return
    if place is not None:
        word = next(messages, b"")
        if word == READ:
            return
        if word != UNSEEN:
            raise Malformed("something else came where it was expected whether the reply's body has been read")
    for portion in portions(body, CHUNK):
        yield b"".join(portion)


class _Doorkeeper:
    """Turns away who does not show the token, before anything that they send is read."""

    def __init__(self, security: Security, rejections: Rejections) -> None:
        self._security = security
        self._rejections = rejections
        self._refusals = {
            shows: grpc.stream_stream_rpc_method_handler(partial(self._refuse, shows)) for shows in ("no", "a wrong")
        }

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        shown = [value for name, value in details.invocation_metadata if name == TOKEN]
        token = shown[0].removeprefix(BEARER) if shown else None
        if self._security.admits(token):
            return continuation(details)
        return self._refusals["no" if token is None else "a wrong"]

    def _refuse(self, shows: str, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        self._rejections.note(context.peer(), f"it shows {shows} token; HETPIPE_TOKEN is to be the same everywhere")
        context.abort(
            grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong; give the server's as HETPIPE_TOKEN"
        )
        yield b""


def _malformed(context: grpc.ServicerContext, sentence: str) -> NoReturn:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence)
    raise AssertionError("abort raises")


def _no(error: Exception, method: str) -> bytes:
    """What to answer when the handler raised."""
    if isinstance(error, CallRefused):
        sentence = str(error)
    else:
        _LOG.error("hetpipe server: %s failed", method, exc_info=error)
        sentence = f"the server failed at {method}: {type(error).__name__}: {error}"
    return Answer(Outcome.REFUSED, sentence.encode()[:HEADER_LIMIT]).pack()


def _misfit(size: int, room: int) -> Answer:
    return Answer(Outcome.REFUSED, f"the reply has a body of {size} bytes, and the caller room for {room}".encode())


def _guarded(call: Callable[[], None], method: str) -> None:
    """Lets no error of the handler's hide why it was called."""
    try:
        call()
    except Exception as error:
        _LOG.error("hetpipe server: giving back the memory of %s failed", method, exc_info=error)
