"""Interface of the calls between virtual workers and servers: a method, a short header, a large body each way.

gRPC carries them (``grpc_server``, ``grpc_channel``); bodies in memory that both sides see are read where they lie
(``shared_memory``). ``tests/server/test_transport.py`` is the contract of both.
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
"""Method by which the link to a server is measured; it changes nothing there."""

HEADER_LIMIT = 1 << 20
"""Largest header that a server accepts, in bytes."""


class CallRefused(Exception):
    """The server refused the call; repeating it changes nothing.

    Args:
        why: the message for the caller.
        turned_away: the reason for the server's log, if the caller cannot go on.
    """

    def __init__(self, why: str, *, turned_away: str = "") -> None:
        super().__init__(why)
        self.turned_away = turned_away


class Unreachable(Exception):
    """No answer: nobody listens, the deadline passed or the connection broke. The request may or may not have been
    served, and may be repeated."""


class Reply(NamedTuple):
    """Answer of a handler."""

    header: bytes
    body: Sequence[memoryview] = ()
    """Contiguous. Read where it lies, also after ``serve`` has returned: the handler must have agreed with its clients
    on when it changes."""


Room = Sequence[memoryview] | Callable[[int], Sequence[memoryview]]
"""Memory for a reply's body: as large as that must be, or a function that makes it for the size that the reply has."""


class Received:
    """Room for a reply's body of any size, which is its ``content`` then."""

    def __init__(self) -> None:
        self.content = bytearray()

    def __call__(self, size: int) -> list[memoryview]:
        self.content = bytearray(size)
        return [memoryview(self.content)]


class SenderGone(Exception):
    """The body of a call did not arrive, or not whole; nobody waits for an answer."""


@dataclass(frozen=True)
class IncomingCall:
    """A call, as the server side has it.

    Attributes:
        method, header: As of `Channel.call`.
        size: bytes of the body.
        receive: fills as many contiguous, writable bytes with the body. Raises `SenderGone`, or what the transport
            raises for a malformed body; the handler lets these exceptions pass.
        offered: the whole body in the client's memory, where that can be seen. ``receive`` copies nothing into just
            this memory. The handler may keep it, also when the client dies; but it must have agreed with the client
            on how long the client leaves it unchanged, and must not write to it.
    """

    method: str
    header: bytes
    size: int
    receive: Callable[[memoryview], None]
    offered: memoryview | None = None


class Handler(Protocol):
    """Server side, called from several threads of the transport at once; may block until its client gives up."""

    def serve(self, call: IncomingCall) -> Reply:
        """Serve ``call``: refuse it before memory is taken for its body, or receive the body.

        Raises:
            CallRefused: reaches the client as one. Any other exception is logged, and refuses the call as well.
        """
        ...


class Channel(Protocol):
    """Client side, one per server; may be used by several threads at once."""

    def call(
        self,
        method: str,
        header: bytes,
        body: Sequence[memoryview] = (),
        into: Room = (),
        timeout: float = TIMEOUT,
    ) -> bytes:
        """Call the server's handler and return its reply's header.

        A call without a body that takes a reply's may reach the handler twice: such calls must change nothing.

        Args:
            method: a name that the handler knows.
            header: at most `HEADER_LIMIT` bytes.
            body: contiguous; read while the call lasts, or for longer where the handler keeps what it is offered.
            into: where to write the reply's body; undefined if this raises.
            timeout: seconds for the whole call.

        Raises:
            CallRefused: by the server, with its message; also if the reply's body does not fit ``into``.
            Unreachable: if no answer came.
        """
        ...

    def close(self) -> None:
        """End the calls that are under way as `Unreachable`, and free everything. May be called again."""
        ...
