"""Content that a VW leaves with the coordinator by name, for VWs that come back, which recall it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_hetpipe.server.process.server_requests import ServerRequests, Wait
from lightning_hetpipe.server.protocol.identifiers import PeerFailed, Refusal, RemoteFault
from lightning_hetpipe.server.protocol.messages import (
    AboutKept,
    Answer,
    AskForKept,
    FetchKept,
    KeepBytes,
    KeptSize,
    NotYet,
)

Content = bytes | Callable[[], bytes]
"""Bytes to leave with a coordinator, or what gives them."""


class KeptContent:
    """Content that a process of a VW leaves with the coordinator, or recalls from it; any thread may call.

    Args:
        requests: The VW's requests.
        incarnation: Of the VW.
    """

    def __init__(self, requests: ServerRequests, incarnation: int) -> None:
        self._requests = requests
        self._me = requests.vw, incarnation
        self._left: dict[str, Content] = {}

    def leave(self, name: str, content: Content | None) -> None:
        """Leave ``content`` with the coordinator under ``name``; None takes it away.

        It is left again with a coordinator that was started again. Raises as :meth:`recall` does.

        Args:
            name: Its name.
            content: The bytes, or where they are large and kept elsewhere, what gives them.
        """
        if content is None:
            self._left.pop(name, None)
        else:
            self._left[name] = content
        self._until_answered(KeepBytes(*self._me, name), _bytes_of(content))

    def leave_again(self) -> None:
        """Leave all again; another thread may leave other content, or take it away, meanwhile."""
        for name in list(self._left):
            sent: Content | None = None
            while (content := self._left.get(name)) is not sent:
                self._requests.ask(KeepBytes(*self._me, name), _bytes_of(content))
                sent = content

    def recall(self, name: str, seconds: float | None = None) -> bytes | None:
        """Return what is kept under ``name``; waits until something is, for so many ``seconds``: then None.

        Raises:
            ServersSilent: after ``timeout`` or ``longest_wait``.
            PeerFailed: another VW has failed.
            RemoteFault: this VW was left out.
            Cancelled: after ``cancel``.
        """
        while (answer := self._until_answered(AskForKept(*self._me, name), seconds=seconds)) is not None:
            assert isinstance(answer, KeptSize)
            found = bytearray(answer.size)
            try:
                self._until_answered(FetchKept(*self._me, name, answer.size), into=[memoryview(found)])
            except RemoteFault as fault:
                if fault.refusal is not Refusal.STALE:
                    raise
            else:
                return bytes(found)
        return None

    def _until_answered(
        self,
        message: AboutKept,
        body: Sequence[memoryview] = (),
        into: Sequence[memoryview] = (),
        seconds: float | None = None,
    ) -> Answer | None:
        """The coordinator's answer to ``message``, asked again until it has one; None after so many ``seconds``."""
        wait = Wait(self._requests)
        while True:
            self._requests.check_goes_on()
            answer = self._requests.ask(message, body, into)
            if answer is not None:
                wait.hear()
            if isinstance(answer, RemoteFault):
                if answer.refusal is Refusal.FAILED:
                    raise PeerFailed(str(answer))
                if answer.refusal not in (Refusal.GENERATION, Refusal.BUSY):  # the heartbeat joins again
                    raise answer
            elif answer is not None and not isinstance(answer, NotYet):
                return answer
            if seconds is not None and wait.seconds > seconds:
                return None
            wait.check(f"VW {self._requests.vw} has waited", f"'{message.name}'")
            if not isinstance(answer, NotYet):
                self._requests.pause()


def _bytes_of(content: Content | None) -> Sequence[memoryview]:
    """The body of a message that leaves ``content``; none takes away what was left before."""
    found = content() if callable(content) else content
    return [memoryview(found)] if found else ()
