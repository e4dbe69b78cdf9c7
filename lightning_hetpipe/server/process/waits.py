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
"""Default timeout of a wait for live VWs, in seconds; long, as they may be in user code."""


class Cancelled(Exception):
    """A wait was ended by ``Client.cancel``."""


class ServersSilent(RuntimeError):
    """A wait for servers, or through them for other VWs, timed out; the message says who waited for whom."""


class ServersUnheard(ServersSilent):
    """No server has answered for ``timeout``."""


class Wait:
    """A wait that begins now, of a ``client`` that makes requests again until it has what it waits for."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._began = self._heard = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time that it has taken so far."""
        return time.monotonic() - self._began

    def hear(self) -> None:
        """Note that a server has answered."""
        self._heard = time.monotonic()

    def check(self, who: str, awaited: str) -> None:
        """Check that neither servers are silent for too long, nor what is ``awaited`` takes too long.

        Raises:
            ServersUnheard: after ``timeout`` without an answer.
            ServersSilent: after ``longest_wait``.
        """
        timeout, longest_wait = self._client.timeout, self._client.longest_wait
        if time.monotonic() - self._heard > timeout:
            silence = f"{self._client.silence}; if it may be silent for longer, raise HetPipeStrategy(timeout=...)"
            raise ServersUnheard(f"{who} for {timeout:g} s for an answer: {silence}")
        if self.seconds > longest_wait:
            raise ServersSilent(f"{who} for {longest_wait:g} s for {awaited}; set a longer timeout if it may")


SLOWEST = 1 << 20
"""Bytes per second at which content, which may be a checkpoint, crosses at least."""

Content = bytes | Path
"""Bytes to leave with a coordinator, or a file that has them."""


class KeptContent:
    """Content that a process of a VW leaves with the coordinator, or recalls from it; any thread may call.

    Args:
        client: The VW's client.
        incarnation: Of the VW.
    """

    def __init__(self, client: Client, incarnation: int) -> None:
        self._client = client
        self._me = client.vw, incarnation
        self._left: dict[str, tuple[messages.KeepBytes, Content]] = {}

    def leave(self, name: str, content: Content | None, readers: Iterable[int] = ()) -> None:
        """Leave ``content`` with the coordinator under ``name``; None takes it away.

        It is left again with a coordinator that was started again. Raises as :meth:`recall` does.

        Args:
            name: Its name.
            content: The bytes, or if they are many, a file, which must stay as it is.
            readers: Incarnations of the VWs that may recall it; all if none are given.
        """
        message = messages.KeepBytes(*self._me, name, tuple(readers))
        self._left.pop(name, None)
        if content is not None:
            self._left[name] = message, content
        self._until_answered(message, _bytes_of(content))

    def leave_again(self) -> None:
        """Leave all again; another thread may leave other content, or take it away, meanwhile."""
        for name in list(self._left):
            sent = None
            while (left := self._left.get(name)) is not sent:
                message, content = left or (messages.KeepBytes(*self._me, name), None)
                self._client.ask(message, _bytes_of(content))
                sent = left

    def recall(self, name: str) -> bytearray:
        """Return what is kept for this VW under ``name``; waits until something is, for as long as servers answer.

        Raises:
            ServersUnheard: after ``timeout``.
            PeerFailed: another VW has failed.
            RemoteFault: this VW was left out.
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
            if answer is not None:
                wait = Wait(self._client)
            wait.check(f"VW {self._client.vw} has waited", f"'{message.name}'")
            if not isinstance(answer, messages.NotYet):
                self._client.pause()


def _bytes_of(content: Content | None) -> Sequence[memoryview]:
    """The body of a message that leaves ``content``; none takes away what was left before."""
    if isinstance(content, Path):
        with content.open("rb") as file:
            return [memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))]
    return [memoryview(content)] if content else ()
