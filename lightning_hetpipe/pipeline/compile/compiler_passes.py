"""The passes of a stage in which torch's compiler may be at work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Exclusively = Callable[[int, str], AbstractContextManager[None]]
"""Given a minibatch's number and who asks: within it no user code runs, and no other thread computes."""


class Compiling:
    """Those of one stage.

    Attributes:
        at_work: Whether it is in one.
        seconds: How long they have taken.
    """

    def __init__(self, stage: int, exclusively: Exclusively) -> None:
        self.at_work = False
        self.seconds = 0.0
        self._stage = stage
        self._exclusively = exclusively

    @contextmanager
    def exclusive(self, layers: str, minibatch: int) -> Iterator[None]:
        """Around such a pass of ``layers``: :mod:`~lightning_hetpipe.pipeline.compile.compilation` says why."""
        with self._exclusively(minibatch, f"stage {self._stage}, which is to compile {layers},"):
            self.at_work, started = True, time.perf_counter()
            try:
                yield
            finally:
                self.at_work = False
                self.seconds += time.perf_counter() - started
