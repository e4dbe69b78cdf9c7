"""Waits of a VW for answers of servers: how they end, and content that VWs leave and recall by such waits."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_hetpipe.server.protocol import messages
from lightning_hetpipe.server.protocol.identifiers import PeerFailed, Refusal, RemoteFault
from lightning_hetpipe.server.transport.interface import Received, Room

if TYPE_CHECKING:
    from lightning_hetpipe.server.process.client import Client

LONGEST_WAIT = 3600.0
"""Default timeout in seconds of a wait for live VWs. It is long because they may be in user code."""


class Cancelled(Exception):
    """Error of a wait that ``Client.cancel`` ended."""


class ServersSilent(RuntimeError):
    """Error of a wait for servers, or through them for other VWs, that timed out. The message says who waited for
    whom."""


class ServersUnheard(ServersSilent):
    """Error that no server has answered for ``timeout``."""


class Wait:
    """Wait of ``client`` that begins now. The client repeats requests until it has the awaited answer."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._began = self._heard = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._began

    def hear(self) -> None:
        """Record that a server has answered."""
        self._heard = time.monotonic()

    def check(self, who: str, awaited: str) -> None:
        """Raise ServersUnheard after ``timeout`` without an answer, or ServersSilent after ``longest_wait`` for
        ``awaited``."""
        timeout, longest_wait = self._client.timeout, self._client.longest_wait
        if time.monotonic() - self._heard > timeout:
            silence = f"{self._client.silence}; if it may be silent for longer, raise HetPipeStrategy(timeout=...)"
            raise ServersUnheard(f"{who} for {timeout:g} s for an answer: {silence}")
        if self.seconds > longest_wait:
            raise ServersSilent(f"{who} for {longest_wait:g} s for {awaited}; set a longer timeout if it may")


SLOWEST = 1 << 20
"""Least bytes per second at which content, which may be a checkpoint, crosses the network."""

Content = bytes | Path
"""Bytes to leave with a coordinator, or a file that contains them."""


class KeptContent:
    """Content that a VW's process leaves with the coordinator or recalls from it, in any thread."""

    def __init__(self, client: Client, incarnation: int) -> None:
        self._client = client
        self._me = client.vw, incarnation
        self._left: dict[str, tuple[messages.KeepBytes, Content]] = {}

    def leave(self, name: str, content: Content | None, readers: Iterable[int] = ()) -> None:
        """Leave ``content`` with the coordinator under ``name``, and again after its restart. None removes the content.

        Large content should be a file, which must not change. Only the incarnations ``readers`` may recall it, or all
        if none are given. Raises as :meth:`recall` does.
        """
        message = messages.KeepBytes(*self._me, name, tuple(readers))
        self._left.pop(name, None)
        if content is not None:
            self._left[name] = message, content
        self._until_answered(message, _bytes_of(content))

    def leave_again(self) -> None:
        """Leave all content again. Meanwhile another thread may leave or remove other content."""
        for name in list(self._left):
            sent = None
            while (left := self._left.get(name)) is not sent:
                message, content = left or (messages.KeepBytes(*self._me, name), None)
                self._client.ask(message, _bytes_of(content))
                sent = left

    def recall(self, name: str) -> bytearray:
        """Return the content for this VW under ``name``. Wait for it while servers answer.

        Raises:
            ServersUnheard: after ``timeout``.
            PeerFailed: if another VW has failed.
            RemoteFault: if this VW was left out.
            Cancelled: after ``cancel``.
        """
        received = Received()
        self._until_answered(messages.Recall(*self._me, name), into=received)
        return received.content

    def _until_answered(self, message: messages.AboutKept, body: Sequence[memoryview] = (), into: Room = ()) -> None:
        """Send ``message`` until the coordinator has served it."""
        wait, timeout = Wait(self._client), self._client.timeout + sum(map(len, body)) / SLOWEST
        while True:
            self._client.check_goes_on()
            answer = self._client.ask(message, body, into, timeout)
            if isinstance(answer, RemoteFault):
                if answer.refusal is Refusal.FAILED:
                    raise PeerFailed(str(answer))
                if answer.refusal not in (Refusal.GENERATION, Refusal.BUSY):  # the heartbeat joins again
                    raise answer
            elif answer is not None and not isinstance(answer, messages.NotYet):
                return
            if isinstance(answer, messages.NotYet):
                wait = Wait(self._client)
            elif answer is not None:
                wait.hear()
            wait.check(f"VW {self._client.vw} has waited", f"'{message.name}'")
            if not isinstance(answer, messages.NotYet):
                self._client.pause()


def _bytes_of(content: Content | None) -> Sequence[memoryview]:
    """Return the body of a message that leaves ``content``. An empty body removes earlier content."""
    if isinstance(content, Path):
        with content.open("rb") as file:
            return [memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))]
    return [memoryview(content)] if content else ()
