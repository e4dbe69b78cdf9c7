"""gRPC server of a handler: generic methods with bytes, bodies in chunks or in shared memory, TLS and a token."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.transport.codec import Malformed
from lightning_hetpipe.server.transport.frames import (
    ANY_SIZE,
    CHUNK,
    OVERHEAD,
    Answer,
    Opening,
    Outcome,
    fill,
    flat,
    portions,
    total,
)
from lightning_hetpipe.server.transport.grpc_import import grpc
from lightning_hetpipe.server.transport.interface import (
    HEADER_LIMIT,
    RELEASE,
    CallRefused,
    Handler,
    IncomingCall,
    SenderGone,
)
from lightning_hetpipe.server.transport.security import Rejections, Security, printable, split
from lightning_hetpipe.server.transport.shared_memory import NoBlock, Views, place_of

SERVICE = "hetpipe"
ONE = "One"
"""gRPC method for calls of one message each way. Bodies, if any, lie in shared memory."""
MANY = "Many"
"""gRPC method for calls whose bodies come in chunks. It takes two to three times as long as `ONE`."""
TOKEN = "authorization"
BEARER = "Bearer "
SHOWN = "hetpipe-release"
"""Name of the metadata with the caller's release."""

CALLS = 256
"""Number of calls that a server serves at once, each in its own thread, even if it waits. Further calls are turned
away. In addition, a server has its own threads and about ten of gRPC's core. Threads of calls end when calls do."""

IDLE = 3.0
"""Seconds without a call after which a thread ends."""

AT_ONCE = 64
"""Number of calls of one connection that run at once. Further calls wait at the caller. A virtual worker makes a few.
"""

HANDSHAKE = 20.0
"""Seconds that a new connection has to speak HTTP/2, and TLS if there are certificates."""

LONGEST = 24 * 3600.0
"""Longest deadline of a call, in seconds. A client that sends nothing more must not hold a thread for ever."""

_STOP = 10.0  # seconds that threads may take to notice that their calls have ended

LIMITS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", CHUNK + HEADER_LIMIT + OVERHEAD),
    # Larger frames and reads: fewer pieces to put together. Measured: a quarter less of CPU time.
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    ("grpc.experimental.tcp_read_chunk_size", 1 << 20),
    ("grpc.experimental.tcp_max_read_chunk_size", 4 << 20),
    # A vanished machine closes no connection. Pings find it.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_Task = tuple[Future[Any], Callable[[], Any]]

_LOG = logging.getLogger(__name__)


class GrpcServer:
    """Server of ``handler`` at ``host:port`` while its context is entered. Port 0 takes any free port."""

    def __init__(self, handler: Handler, address: str = "127.0.0.1:0", security: Security | None = None) -> None:
        """Check the arguments. Entering the context takes the port. The default ``security`` allows only loopback
        addresses.

        Raises:
            SettingError: if the address is malformed, or open without certificates.
        """
        self._security = security or Security()
        self._security.check(address)
        self._host, self._port = address.rpartition(":")[0], split(address)[1]
        self._handler = handler
        self._rejections = Rejections()
        self._views = Views()
        self._threads: CallThreads | None = None
        self._server: grpc.Server | None = None

    @property
    def address(self) -> str:
        """``host:port``, with the port in use."""
        return f"{self._host}:{self._port}"

    def __enter__(self) -> Self:
        """Listen and serve. Raise SettingError if the address or the certificates cannot be used."""
        credentials = None
        if self._security.encrypted:
            ca, certificate, key = self._security.read()
            credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
        options = (
            *LIMITS,
            ("grpc.so_reuseport", 0),  # or two servers could share a port, and its calls, unnoticed
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.max_concurrent_streams", AT_ONCE),
            ("grpc.server_handshake_timeout_ms", round(1000 * HANDSHAKE)),  # the default is two minutes
        )
        self._threads = CallThreads(CALLS, "hetpipe-server")
        server = grpc.server(
            self._threads,
            interceptors=(_Doorkeeper(self._security, self._rejections),),
            options=options,
            maximum_concurrent_rpcs=CALLS,
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

    def __exit__(self, *_: object) -> None:
        """End running calls with `Unreachable`, free the port, and wait for threads that are not in the handler."""
        server, self._server = self._server, None
        if server is None or self._threads is None:
            return
        server.stop(None).wait(_STOP)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._views.close()

    def _one(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        opening, header = self._opening(message, context)
        if bool(opening.size) != bool(opening.place) or (opening.room and not opening.accepts_place):
            _malformed(context, "a call of one message cannot carry a body, only the place where one lies")
        return next(self._answers(opening, header, None, context), b"")

    def _many(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        opening, header = self._opening(next(messages, b""), context)
        yield from self._answers(opening, header, messages, context)

    def _opening(self, message: bytes, context: grpc.ServicerContext) -> tuple[Opening, bytes]:
        why = f"a call needs a deadline of at most {LONGEST:.0f} s" if context.time_remaining() > LONGEST else ""
        try:
            opened = Opening.unpack(message)
        except Malformed as error:
            why = str(error)
        if why:
            if message:  # empty if a caller, perhaps interrupted, ended its call at once
                self._rejections.note(context.peer(), why)
            _malformed(context, why)
        return opened

    def _answers(
        self, opening: Opening, header: bytes, messages: Iterator[bytes] | None, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Yield the answer. ``messages`` follow the opening, and are None in a call of one message."""
        try:
            yield from self._served(opening, header, messages, context)
        except NoBlock as no:
            yield Answer(Outcome.PLACE_UNREADABLE).pack(str(no).encode())
        except Malformed as error:
            _malformed(context, str(error))
        except SenderGone:
            return
        except CallRefused as no:
            if no.turned_away:
                self._rejections.note(context.peer(), no.turned_away)
            yield Answer(Outcome.REFUSED).pack(str(no).encode()[:HEADER_LIMIT])

    def _served(
        self, opening: Opening, header: bytes, messages: Iterator[bytes] | None, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        method, size = opening.method, opening.size
        offered = None
        if opening.place is None:
            self._views.drop()
        else:
            offered = self._views.look(opening.place)
            if offered.nbytes != size:
                raise Malformed(f"a body of {size} bytes lies where {offered.nbytes} are")

        def receive(memory: memoryview) -> None:
            if memory.nbytes != size:
                raise ValueError(f"the handler opened {memory.nbytes} bytes for {size}")
            pieces = messages or iter(()) if offered is None else iter([offered])
            if memory is not offered and (left := fill(flat([memory]), pieces)):
                raise Malformed(f"a body of {size} bytes ended, or went on, {left} bytes before its end")
            if not context.is_active():
                raise SenderGone

        try:
            reply = self._handler.serve(IncomingCall(method, header, size, receive, offered))
        except (CallRefused, Malformed, SenderGone):
            raise
        except Exception as error:
            _LOG.error("hetpipe server: %s failed", method, exc_info=error)
            raise CallRefused(f"the server failed at {method}: {type(error).__name__}: {error}") from error
        body = flat(reply.body)
        given = total(body)
        if opening.room not in (given, ANY_SIZE):
            raise CallRefused(f"the reply has a body of {given} bytes, and the caller room for {opening.room}")
        place = place_of(body) if opening.accepts_place else None
        if messages is None and given and place is None:
            yield Answer(Outcome.REPLY_WITHOUT_PLACE).pack(b"the reply's body does not lie in shared memory")
            return
        yield Answer(Outcome.REPLY, given, place).pack(reply.header)
        if place is None:
            yield from portions(body)


class _Doorkeeper:
    """Interceptor that turns away callers without the token, or of another release, before it reads their messages."""

    def __init__(self, security: Security, rejections: Rejections) -> None:
        self._security = security
        self._rejections = rejections

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        shown = dict(reversed(details.invocation_metadata))  # of several with one name, the first counts
        token, release = shown.get(TOKEN), shown.get(SHOWN)
        if not self._security.admits(None if token is None else token.removeprefix(BEARER)):
            what = "no" if token is None else "a wrong"
            return self._refusal(
                grpc.StatusCode.UNAUTHENTICATED,
                f"it shows {what} token; HETPIPE_TOKEN must be the same everywhere",
                "the token is missing or wrong; give the server's as HETPIPE_TOKEN",
            )
        if release not in (None, RELEASE):  # callers before 0.1 show no release, but frames have a version
            versions = f"of lightning-hetpipe {printable(release)}, and the server of {RELEASE}"
            return self._refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"it is {versions}",
                f"the caller is {versions}; install the same release on all machines",
            )
        return continuation(details)

    def _refusal(self, code: grpc.StatusCode, noted: str, told: str) -> Any:
        def refuse(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            self._rejections.note(context.peer(), noted)
            context.abort(code, told)
            yield b""

        return grpc.stream_stream_rpc_method_handler(refuse)


def _malformed(context: grpc.ServicerContext, sentence: str) -> NoReturn:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence)
    raise AssertionError("abort raises")


class CallThreads(Executor):
    """Executor with at most ``most`` threads. A thread ends after ``idle`` seconds without a call.

    ``ThreadPoolExecutor`` keeps each thread that it has made: after a storm of calls, a server would keep hundreds.
    Here the thread that became idle last takes the next call, so the other threads can end.
    """

    def __init__(self, most: int, name: str, idle: float = IDLE) -> None:
        self._most, self._name, self._idle = most, name, idle
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._free: list[queue.SimpleQueue[_Task | None]] = []
        self._waiting: deque[_Task] = deque()
        self._ended = False

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        """Call ``fn`` in one of the threads. Raise RuntimeError after `shutdown`."""
        future: Future[Result] = Future()
        task = future, partial(fn, *args, **kwargs)
        with self._lock:
            if self._ended:
                raise RuntimeError("the server has stopped")
            if self._free:
                self._free.pop().put(task)
                return future
            self._waiting.append(task)
            if len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name=self._name)
                try:
                    thread.start()
                    self._threads.add(thread)
                except RuntimeError:  # the process may have no more threads, but a thread here takes the task later
                    if not self._threads:
                        self._waiting.pop()
                        raise
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no further calls. Threads end after the running and waiting calls. ``cancel_futures`` cancels the
        waiting calls."""
        with self._lock:
            self._ended = True
            dropped = [*self._waiting] if cancel_futures else []
            if cancel_futures:
                self._waiting.clear()
            for each in self._free:
                each.put(None)
            self._free.clear()
            threads = [*self._threads]
        for future, _ in dropped:
            future.cancel()
        for thread in threads if wait else ():
            thread.join()

    def _work(self) -> None:
        own: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        while (task := self._next(own)) is not None:
            _run(*task)
            task = None  # else the call's objects would be kept while this thread is idle
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _next(self, own: queue.SimpleQueue[_Task | None]) -> _Task | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            if self._ended:
                return None
            self._free.append(own)
        try:
            return own.get(timeout=self._idle)
        except queue.Empty:
            with self._lock:
                if own in self._free:
                    self._free.remove(own)
                    return None
            return own.get()  # a call was handed over at the last moment


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
