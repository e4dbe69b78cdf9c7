"""What carries calls between virtual workers and servers, as one interface: a method, a short header, a large body.

There are three carriers, alike in all that a caller can see: gRPC; gRPC with the bodies read where they lie, in memory
that both sides see (``shared_memory``); and memory alone within one process (for tests).
``tests/server/test_transport.py`` says what each of them keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

TIMEOUT = 60.0
"""Seconds that a call may take unless its caller says otherwise."""

STATUS = "status"
"""The method that a server answers with what it says of itself, a JSON object in the reply's header."""

HEADER_LIMIT = 1 << 20
"""Bytes of a header, or of a method's name, that a server takes."""


class CallRefused(Exception):
    """The server said no, and why; to ask again would change nothing."""


class Unreachable(Exception):
    """Nobody is there, or the deadline passed, or the connection broke. What was asked may or may not have been done,
    and may be asked again."""


class Reply(NamedTuple):
    """What a handler answers."""

    header: bytes
    body: Sequence[memoryview] = ()
    """Contiguous; read where it lies, and so not to be changed before ``done`` is called."""
    done: Callable[[], None] | None = None
    """Called once when nothing reads ``body`` any more, whether or not it reached the client."""
    rejected: str = ""
    """Why the caller is turned away for good, if it is: for who watches the server. The caller reads the header."""


class Handler(Protocol):
    """The server's side. Called from the transport's threads, several at once; may block until its client gives up.

    For each call there is one ``open`` and, if that returns, either one ``run`` or one ``abandoned``. Each may raise
    `Refused`, whose sentence reaches the client as a `Refused`; any other exception is logged, and is one there too.
    """

    def open(self, method: str, header: bytes, size: int, offered: memoryview | None = None) -> memoryview:
        """Where to write the request's body: ``size`` contiguous, writable bytes (0 where there is no body).

        The place to refuse: nothing of the body has been kept yet.

        Args:
            offered: the body itself, whole already, in the client's memory, where that can be seen. If just this is
                returned nothing is copied, and the handler may keep it, also when the client dies; but it must have
                agreed with the client on how long the client leaves it as it is, and must not write to it.
        """
        ...

    def run(self, method: str, header: bytes, body: memoryview) -> Reply:
        """Serves the request; ``body`` is what ``open`` returned, now filled, and from now on the handler's."""
        ...

    def abandoned(self, method: str, header: bytes, body: memoryview) -> None:
        """The body will never be whole, as its sender is gone: ``body``, partly filled, is the handler's again."""
        ...


class Channel(Protocol):
    """The client's side, one per server; may be used by several threads at once."""

    def call(
        self,
        method: str,
        header: bytes,
        body: Sequence[memoryview] = (),
        into: Sequence[memoryview] = (),
        timeout: float = TIMEOUT,
    ) -> bytes:
        """Calls the server's handler and returns its reply's header.

        What has no body and takes a reply's may be asked of the handler twice: such calls are to change nothing.

        Args:
            method: a name that the handler knows.
            header: at most `HEADER_LIMIT` bytes.
            body: contiguous; read while the call lasts, or for longer where the handler keeps what it is offered.
            into: where to write the reply's body, which must be exactly as large; in an undefined state if this raises.
            timeout: seconds for all of it.

        Raises:
            Refused: by the server, whose sentence it holds; also if the reply does not fit ``into``.
            Unreachable: see there. Never raised after the reply has come.
        """
        ...

    def close(self) -> None:
        """Ends the calls that are under way as `Unreachable`, and gives everything back. May be called again."""
        ...


class Server(Protocol):
    """A handler at an address. Serves between entering and leaving the context."""

    @property
    def address(self) -> str:
        """Where it is to be reached, with the port that it really got."""
        ...

    def stop(self) -> None:
        """Ends the calls that are under way, which their clients see as `Unreachable`. May be called again."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
