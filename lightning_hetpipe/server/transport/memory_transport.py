"""The transport within one process, for tests: the contract of the others without sockets or other processes."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from lightning_hetpipe.server.transport.body_buffers import Filling, flat, portions, total
from lightning_hetpipe.server.transport.interface import TIMEOUT, CallRefused, Handler, Reply, Unreachable

_CHUNK = 1 << 20  # bytes that are copied before somebody looks whether the caller is still there

_LOG = logging.getLogger(__name__)
_running: dict[str, MemoryServer] = {}
_numbers = itertools.count(1)


class MemoryServer:
    """A `Server` that channels of this process find by its name."""

    def __init__(self, handler: Handler, address: str | None = None, calls: int = 64) -> None:
        """``address``: any name that no running server has; default: a new one."""
        self._address = address or f"memory-{next(_numbers)}"
        self._handler = handler
        self._most = calls
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._calls: set[_Call] = set()

    @property
    def address(self) -> str:
        """The name."""
        return self._address

    def __enter__(self) -> Self:
        self._threads = ThreadPoolExecutor(self._most, thread_name_prefix="hetpipe-memory-server")
        if _running.setdefault(self._address, self) is not self:
            raise ValueError(f"{self._address} is running already")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the calls under way; waits for no thread that the handler holds."""
        if _running.get(self._address) is self:
            del _running[self._address]
        with self._lock:
            threads, self._threads = self._threads, None
            calls, self._calls = self._calls, set()
        for call in calls:
            call.end(Unreachable(f"the server {self._address} has stopped"))
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def serve(self, call: _Call) -> None:
        """Begins to serve a call, in another thread."""
        with self._lock:
            if self._threads is None:
                raise Unreachable(f"the server {self._address} has stopped")
            if len(self._calls) >= self._most:
                raise Unreachable(f"the server {self._address} is busy")
            self._calls.add(call)
            self._threads.submit(self._serve, call)

    def _serve(self, call: _Call) -> None:
        try:
            call.run(self._handler)
        except CallRefused as no:
            call.end(no)
        except Exception as error:
            _LOG.error("hetpipe server: %s failed", call.method, exc_info=error)
            call.end(CallRefused(f"the server failed at {call.method}: {type(error).__name__}: {error}"))
        finally:
            with self._lock:
                self._calls.discard(call)


class MemoryChannel:
    """A `Channel` to the running `MemoryServer` of that name, whichever it is at the time of a call."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._closed = False

    def call(
        self,
        method: str,
        header: bytes,
        body: Sequence[memoryview] = (),
        into: Sequence[memoryview] = (),
        timeout: float = TIMEOUT,
    ) -> bytes:
        """As `Channel.call` says."""
        call = _Call(method, header, flat(body), flat(into))
        with self._lock:
            if self._closed:
                raise Unreachable(f"the channel to {self.address} was closed")
            self._calls.add(call)
        try:
            server = _running.get(self.address)
            if server is None:
                raise Unreachable(f"there is no server {self.address}")
            server.serve(call)
            if not call.ended.wait(timeout):
                call.end(Unreachable(f"the server {self.address} did not answer {method} in {timeout:g} s"))
            return call.result()
        finally:
            call.end(Unreachable("given up"))
            with self._lock:
                self._calls.discard(call)

    def close(self) -> None:
        """Ends the calls that are under way as `Unreachable`. May be called again."""
        with self._lock:
            self._closed = True
            calls = [*self._calls]
        for call in calls:
            call.end(Unreachable(f"the channel to {self.address} was closed"))


class _Call:
    """A call, which the first of these ends: its reply, its deadline, the channel's end, the server's end."""

    def __init__(self, method: str, header: bytes, body: list[memoryview], into: list[memoryview]) -> None:
        self.method, self._header, self._body, self._into = method, header, body, into
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._result: bytes | Exception | None = None

    def end(self, result: Exception) -> None:
        """Ends the call with this, unless it has ended."""
        with self._lock:
            if self._result is None:
                self._result = result
                self.ended.set()

    def result(self) -> bytes:
        """The reply's header, or raises what ended the call instead."""
        if isinstance(self._result, Exception):
            raise self._result
        assert self._result is not None
        return self._result

    def run(self, handler: Handler) -> None:
        """The server's part."""
        size = total(self._body)
        body = handler.open(self.method, self._header, size)
        if not self._fill(body, size):
            handler.abandoned(self.method, self._header, body)
            return
        reply = handler.run(self.method, self._header, body)
        try:
            self._deliver(reply)
        finally:
            if reply.done is not None:
                reply.done()

    def _fill(self, body: memoryview, size: int) -> bool:
        """Copies the body; returns whether the caller was there all the while, and so all of it is what was meant."""
        if body.nbytes != size:
            raise ValueError(f"the handler opened {body.nbytes} bytes for {size}")
        filling = Filling(flat([body]))
        for portion in portions(self._body, _CHUNK):
            for part in portion:
                filling.write(part)
            if self.ended.is_set():
                return False
        return not self.ended.is_set()

    def _deliver(self, reply: Reply) -> None:
        size, room = total(reply.body), total(self._into)
        if size != room:
            raise CallRefused(f"the reply has a body of {size} bytes, and the caller room for {room}")
        with self._lock:
            if self._result is not None:
                return  # what `into` holds is the caller's own affair again
            filling = Filling(self._into)
            for part in flat(reply.body):
                filling.write(part)
            self._result = reply.header
            self.ended.set()
