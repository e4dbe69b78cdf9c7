"""Deadlock detector: finds VWs that wait for each other in a circle, so that all can be told.

A deadlock arises where a program calls a collective (a gather) at different minibatches: one VW waits in the gather for
the other, which waits for the first one's wave.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from lightning_hetpipe.server.protocol.identifiers import RemoteFault
from lightning_hetpipe.server.protocol.messages import Answer, Heartbeat, NotYet, Request

Serve = Callable[[Any, bytes], tuple[Answer, Sequence[bytes]]]

CIRCLE = (
    "all virtual workers wait for each other; call what needs all of them, such as a metric with sync_dist=True or a"
    " checkpoint, after the same minibatch on each"
)


class DeadlockDetector:
    """Keeps the last request of each VW that waits for its answer."""

    def __init__(self) -> None:
        self._waiting: dict[int, Request] = {}

    def after(self, vw: int, message: Request, answer: Answer, members: Collection[int], serve: Serve) -> str | None:
        """Return who waits for whom, if all ``members`` do and nothing can change that.

        Args:
            vw: sender of the request.
            message: its request.
            answer: to the request.
            members: all whose requests could change anything.
            serve: answers a request once more; the part of a gather is known already.
        """
        if isinstance(message, Heartbeat):
            return None
        self._waiting.pop(vw, None)
        if isinstance(answer, NotYet):
            self._waiting[vw] = message
        if not members or not set(members) <= self._waiting.keys():
            return None
        told = []
        for other in sorted(members):
            try:
                answer, _ = serve(self._waiting[other], b"")  # something may have changed since
            except RemoteFault:
                return None
            if not isinstance(answer, NotYet):
                return None
            told.append(f"VW {other} for {answer.waits_for}")
        return f"{CIRCLE}: {'; '.join(told)}"

    def forget(self, vw: int) -> None:
        """Drop a VW that is gone."""
        self._waiting.pop(vw, None)
