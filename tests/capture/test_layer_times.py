"""Layer times, measured with a clock that only the layers move."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hetpipe.capture.profiling import ROUNDS, layer_times
from tests.conftest import Clock


class Layers:
    """Makes layers that move the clock on, and keeps the order in which they run."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.calls: list[str] = []

    def layer(self, name: str, seconds: list[float]) -> Callable[[], Any]:
        """Brings a layer that takes ``seconds`` of its calls, one after another; to bring it takes a hundred."""
        left = iter(seconds)

        def run() -> None:
            self.calls.append(name)
            self.clock.now += next(left)

        def brought() -> Any:
            self.clock.now += 100.0
            return SimpleNamespace(run=run, lasts=False)

        return brought


@pytest.fixture
def layers(clock: Clock) -> Layers:
    return Layers(clock)


def test_layers_take_turns(layers: Layers) -> None:
    layer_times([layers.layer(name, [1.0] * 3) for name in "abc"], rounds=3)
    assert layers.calls == ["a", "b", "c"] * 3


def test_a_time_is_the_least(layers: Layers) -> None:
    first = layers.layer("first", [900.0, 1.0, 50.0])  # twice disturbed
    second = layers.layer("second", [0.25, 0.5, 0.125])
    assert layer_times([first, second], rounds=3) == [1.0, 0.125]


def test_as_many_rounds_as_it_says(layers: Layers) -> None:
    layer_times([layers.layer("only", [1.0] * ROUNDS)])
    assert len(layers.calls) == ROUNDS


def test_no_layers() -> None:
    assert layer_times([]) == []
