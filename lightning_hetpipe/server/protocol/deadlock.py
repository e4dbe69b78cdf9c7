"""Finds VWs that wait for each other in a circle: then nobody will ever go on, and all are told so.

It happens where a program asks all VWs something (a gather) at different minibatches: one waits in the gather for the
other, which waits for the first one's wave.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from lightning_hetpipe.server.protocol.identifiers import RemoteFault
from lightning_hetpipe.server.protocol.messages import Answer, Heartbeat, NotYet, Request

Serve = Callable[[Any, bytes], tuple[Answer, Sequence[bytes]]]

CIRCLE = (
    "all wait for each other; what one asks all of, as a metric with sync_dist=True or a checkpoint does, has to come"
    " after the same minibatch of each"
)


class DeadlockDetector:
    """What each VW has asked last, if it waits for the answer."""

    def __init__(self) -> None:
        self._waiting: dict[int, Request] = {}

    def after(self, vw: int, message: Request, answer: Answer, members: Collection[int], serve: Serve) -> str | None:
        """Says who waits for whom, where all ``members`` do, and will for ever.

        Args:
            vw: Who has asked.
            message: What it has asked.
            answer: What it was answered.
            members: All who could change anything.
            serve: Answers what was asked, once more; a gather's part has come before.
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
        """The VW is gone."""
        self._waiting.pop(vw, None)
