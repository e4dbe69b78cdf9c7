"""A wave's end, as the pipeline sees it; what becomes of the weights, real launches show (tests/wsp)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.pipeline.lock import Rank, Ticket
from tests.exact.pipelines import even
from tests.exact.running import fit
from tests.models import SGD, mlp, vectors


class Waves:
    """In the place of a Synchroniser, with waves of two minibatches."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.ended: list[int] = []
        self.version = 0

    def agree(self, in_flight: int) -> int:
        return in_flight

    def published(self, version: int) -> bool:
        self.version = version
        return version % 2 == 0

    def synchronise(self, computing: Callable[[], AbstractContextManager[None]]) -> None:
        with computing():
            self.meet_user_code()

    def cut(self, *_: Any) -> None:
        self.meet_user_code()

    def take_buffers(self) -> None: ...

    def leave(self) -> None: ...

    def meet_user_code(self) -> None:
        """A stretch of user code that comes now gets the lock over user code."""
        stretch = Ticket(Rank.START, self.version)
        self.strategy._engine.lock.request(stretch)
        assert stretch.wait(30)
        self.strategy._engine.lock.release()
        self.ended.append(self.version)


def test_user_code_runs_while_a_wave_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses that stages wait for had to wait for a wave's update to be computed, and for its weights to be copied."""
    strategy = even(7, 2, 3)
    waves = Waves(strategy)
    monkeypatch.setattr(HetPipeStrategy, "_synchroniser", lambda self, trainer: waves)
    loader = vectors(14, 2)
    fit(mlp(SGD), loader, strategy=strategy, max_epochs=1)
    assert len(loader) == 7
    assert waves.ended == [2, 4, 6, 6]  # the last one at the end of the epoch
