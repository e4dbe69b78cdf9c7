"""Requests of a VW to servers: each is answered, refused, or met with silence; and waits for answers have an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from lightning_hetpipe.server.process.held_weights import ShardCall
from lightning_hetpipe.server.process.service import COORDINATOR_METHOD, SHARD_METHOD
from lightning_hetpipe.server.protocol.identifiers import COORDINATOR, Refusal, RemoteFault
from lightning_hetpipe.server.protocol.messages import (
    Answer,
    Departed,
    Done,
    Joined,
    Lost,
    Request,
    ShardRequest,
    decode,
    encode,
)
from lightning_hetpipe.server.transport.interface import CallRefused, Channel, Unreachable

LONGEST_WAIT = 3600.0
"""Default timeout of a wait for live VWs, in seconds; long, as they may be in user code."""

News = TypeVar("News", Departed, Lost)


class Cancelled(Exception):
    """A wait was ended by ``ServerRequests.cancel``."""


class ServersSilent(RuntimeError):
    """A wait for servers, or through them for other VWs, timed out; the message says who waited for whom."""


class ServersUnheard(ServersSilent):
    """No server has answered for ``timeout``."""


class ServerRequests:
    """Requests of virtual worker ``vw``, by any thread.

    Args:
        channels: one per server; the first is the coordinator's.
        vw: i.
        lease: seconds, equal to the servers'.
        timeout: seconds for which servers may be unreachable, and which one request may take; may be changed.
        longest_wait: seconds to wait for other VWs, as long as they live; may be changed.
        lost: returns the error by which the servers are known not to come back, once there is one.
        departed: called once for each other VW that was left out or has left, from any thread.
        updates_lost: likewise, for updates of another VW that nobody holds any more, as it died together with servers.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        vw: int,
        lease: float,
        timeout: float,
        longest_wait: float,
        lost: Callable[[], Exception | None],
        departed: Callable[[Departed], None],
        updates_lost: Callable[[Lost], None],
    ) -> None:
        self.vw = vw
        self.timeout, self.longest_wait = timeout, longest_wait
        self.failure: Exception | None = None
        """Fatal error that is known; waits end with it."""
        self.silence = ""
        """The transport's error of the last request without an answer; it names the server."""
        self._channels = channels
        self._lease = lease
        self._lost = lost
        self._on_departed = departed
        self._on_updates_lost = updates_lost
        self._told: set[Departed | Lost] = set()
        self._hears = threading.Lock()
        self._stopped = threading.Event()

    def cancel(self) -> None:
        """End the wait that is under way, and all later ones, as ``Cancelled``."""
        self._stopped.set()

    def check(self) -> None:
        """Raise the fatal error that is known, if any; to be called where nothing waits for long."""
        if (failure := self.failure or self._lost()) is not None:
            raise failure

    def check_goes_on(self) -> None:
        """Raise what ends a wait: that it was cancelled, or the fatal error that is known."""
        if self._stopped.is_set():
            raise Cancelled("the call was cancelled")
        self.check()

    def pause(self) -> None:
        """Wait before the next request, where nothing waits at the other end; less if cancelled."""
        self._stopped.wait(min(0.1, self._lease / 10))

    def ask(
        self,
        message: Request,
        body: Sequence[memoryview] = (),
        into: Sequence[memoryview] = (),
        timeout: float | None = None,
        channel: Channel | None = None,
    ) -> Answer | RemoteFault | None:
        """Return the coordinator's answer; ``None`` if none came.

        Args:
            message: The request.
            body: Bytes that belong to it.
            into: Room for the bytes that belong to the answer.
            timeout: Seconds; by default those of the VW.
            channel: The way to the coordinator, if not the first channel.
        """
        channel, timeout = channel or self._channels[COORDINATOR], timeout or self.timeout
        return self._answered(message, lambda header: channel.call(COORDINATOR_METHOD, header, body, into, timeout))

    def ask_shard(self, call: ShardCall) -> Answer | RemoteFault | None:
        """Return the answer of a server's shard; ``None`` if none came."""
        channel, by = self._channels[call.server], call.by
        return self._answered(
            call.message, lambda header: by.call(channel, SHARD_METHOD, header, call.body, call.into, self.timeout)
        )

    def _answered(self, message: Request | ShardRequest, call: Callable[[bytes], bytes]) -> Answer | RemoteFault | None:
        try:
            header = call(encode(message))
        except Unreachable as silence:
            self.silence = str(silence)
            return None
        except CallRefused as refused:
            return RemoteFault.parse(str(refused))
        answer = decode(header)
        if not isinstance(answer, Answer):
            raise RemoteFault(Refusal.MALFORMED, f"a server answered with a {type(answer).__name__}")
        if isinstance(answer, Done):
            for departed in self._news(answer.departed):
                self._on_departed(departed)
        elif isinstance(answer, Joined):
            for lost in self._news(answer.lost):
                self._on_updates_lost(lost)
        return answer

    def _news(self, told: Sequence[News]) -> list[News]:
        with self._hears:
            # Its own departure is an error of its calls.
            news = [each for each in told if each not in self._told and each.vw != self.vw]
            self._told.update(news)
        return news


class Wait:
    """A wait that begins now, of one who makes ``requests`` again until it has what it waits for."""

    def __init__(self, requests: ServerRequests) -> None:
        self._requests = requests
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
        timeout, longest_wait = self._requests.timeout, self._requests.longest_wait
        if time.monotonic() - self._heard > timeout:
            silence = f"{self._requests.silence}; if it may be silent for longer, raise HetPipeStrategy(timeout=...)"
            raise ServersUnheard(f"{who} for {timeout:g} s for an answer: {silence}")
        if self.seconds > longest_wait:
            raise ServersSilent(f"{who} for {longest_wait:g} s for {awaited}; set a longer timeout if it may")
