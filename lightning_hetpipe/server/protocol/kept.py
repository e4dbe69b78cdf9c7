"""Bytes that VWs leave with the coordinator by name, for those that come back, until somebody takes them away.

A restarted coordinator has none of it; whoever has left something leaves it again (``KeptContent``).

Bound: each has at most ``limit`` bytes; VW 0, which is the only one to leave large ones, leaves one model's state.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetpipe.server.protocol.identifiers import Refusal, RemoteFault
from lightning_hetpipe.server.protocol.messages import (
    AboutKept,
    Answer,
    AskForKept,
    Done,
    FetchKept,
    KeepBytes,
    KeptSize,
    NotYet,
)


class KeptBytes:
    """Bytes by name; ``limit`` is the largest number for one name."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: dict[str, bytes] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._kept)

    def check(self, size: int) -> None:
        if size > self.limit:
            raise RemoteFault(Refusal.TOO_LARGE, f"{size} bytes to keep are more than the {self.limit} allowed")

    def serve(self, message: AboutKept, body: bytes) -> tuple[Answer, Sequence[bytes]]:
        """Return the answer and its body."""
        if isinstance(message, KeepBytes):
            self._kept.pop(message.name, None)
            if body:
                self._kept[message.name] = body
            return Done(), ()
        content = self._kept.get(message.name)
        if content is None and isinstance(message, FetchKept):  # whose answer would have a body
            raise RemoteFault(Refusal.STALE, f"'{message.name}' is not kept any more")
        if content is None:
            return NotYet(f"'{message.name}', which VW 0 leaves"), ()
        if isinstance(message, AskForKept):
            return KeptSize(len(content)), ()
        if message.size != len(content):
            raise RemoteFault(Refusal.STALE, f"'{message.name}' has other bytes now")
        return KeptSize(len(content)), [content]
