"""Interface of the calls between virtual workers and servers: a method, a short header, a large body each way.

gRPC carries the calls (``grpc_server``, ``grpc_channel``). Bodies in memory that both sides can map are read in place
(``shared_memory``). ``tests/server/test_transport.py`` is the contract of both transports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import NamedTuple, Protocol

RELEASE = metadata.version("lightning-hetpipe")

TIMEOUT = 60.0
"""Default deadline of a call, in seconds."""

STATUS = "status"
"""Method that a server answers with its status, a JSON object in the reply's header."""

LINK = "link"
"""Method for measurements of the link to a server. It changes nothing there."""

HEADER_LIMIT = 1 << 20
"""Largest header that a server accepts, in bytes."""


class CallRefused(Exception):
    """Refusal of a call by the server. Repeating the call changes nothing. ``why`` is the message for the caller, and
    ``turned_away`` the reason for the server's log if the caller cannot go on."""

    def __init__(self, why: str, *, turned_away: str = "") -> None:
        super().__init__(why)
        self.turned_away = turned_away


class Unreachable(Exception):
    """Absence of an answer: no server listens, the deadline passed, or the connection broke. The request may or may not
    have been served, and may be repeated."""


class Reply(NamedTuple):
    """Answer of a handler."""

    header: bytes
    body: Sequence[memoryview] = ()
    """Contiguous buffers, read in place even after ``serve`` has returned. The handler must have agreed with its
    clients on when the buffers change."""


Room = Sequence[memoryview] | Callable[[int], Sequence[memoryview]]
"""Memory for a reply's body: buffers of exactly its size, or a function that makes buffers for the size of the reply.
"""


class Received:
    """Room for a reply's body of any size, which becomes ``content``."""

    def __init__(self) -> None:
        self.content = bytearray()

    def __call__(self, size: int) -> list[memoryview]:
        self.content = bytearray(size)
        return [memoryview(self.content)]


class SenderGone(Exception):
    """Error for a call's body that did not arrive completely. Its caller does not wait for an answer."""


@dataclass(frozen=True)
class IncomingCall:
    """Call on the server side, with ``method`` and ``header`` as in `Channel.call`.

    Attributes:
        size: Bytes of the body.
        receive: Function that fills ``size`` contiguous, writable bytes with the body. It raises `SenderGone`, or the
            transport's error for a malformed body. The handler lets these exceptions pass.
        offered: The whole body in the client's memory, if the server can map it and the client awaits no body.
            ``receive`` into this memory copies nothing. The handler may keep it, even if the client dies, but must not
            write to it. The handler must have agreed with the client on how long the client leaves it unchanged.
    """

    method: str
    header: bytes
    size: int
    receive: Callable[[memoryview], None]
    offered: memoryview | None = None


class Handler(Protocol):
    """Server side, called from several threads of the transport at once. A call may block until its client gives up."""

    def serve(self, call: IncomingCall) -> Reply:
        """Serve ``call``: receive its body, or refuse the call before taking memory for the body.

        Raises:
            CallRefused: to refuse the call. Any other exception is logged, and also refuses the call.
        """
        ...


class Channel(Protocol):
    """Client side, with one channel per server. Several threads may use a channel at once."""

    def call(
        self, method: str, header: bytes, body: Sequence[memoryview] = (), into: Room = (), timeout: float = TIMEOUT
    ) -> bytes:
        """Call the server's handler, and return the header of its reply.

        A call without a body that has room for a reply's body may reach the handler twice. Such a call must change
        nothing.

        Args:
            method: Name that the handler knows.
            header: At most `HEADER_LIMIT` bytes.
            body: Contiguous buffers. They are read during the call, or longer if the handler keeps
                `IncomingCall.offered`.
            into: Room for the reply's body. Its contents are undefined if this raises.
            timeout: Seconds for the whole call.

        Raises:
            CallRefused: by the server, with its message, or if the reply's body does not fit ``into``.
            Unreachable: if no answer came.
        """
        ...

    def close(self) -> None:
        """End running calls with `Unreachable`, and free everything. May be called again."""
        ...
