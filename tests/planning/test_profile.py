"""Layer times, measured with a clock that only the layers move."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from lightning_hetpipe.planning import profile
from lightning_hetpipe.planning.profile import ROUNDS, layer_times


class Clock:
    """Stands still except while a layer runs."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls: list[str] = []

    def layer(self, name: str, seconds: list[float]) -> Callable[[], None]:
        """A layer that takes ``seconds`` of its calls, one after another."""
        left = iter(seconds)

        def run() -> None:
            self.calls.append(name)
            self.now += next(left)

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_layers_take_turns_and_each_is_warmed_up_once(clock: Clock) -> None:
    layers = [clock.layer(name, [1.0] * 4) for name in "abc"]
    layer_times(layers, rounds=3)
    assert clock.calls == ["a", "b", "c"] * 4


def test_a_time_is_the_median_without_the_first(clock: Clock) -> None:
    first = clock.layer("first", [900.0, 1.0, 3.0, 50.0])  # slow to warm up, and once disturbed
    second = clock.layer("second", [0.0, 0.25, 0.5, 0.125])
    assert layer_times([first, second], rounds=3) == [3.0, 0.25]


def test_an_even_number_of_rounds(clock: Clock) -> None:
    assert layer_times([clock.layer("only", [9.0, 1.0, 2.0])], rounds=2) == [1.5]


def test_as_many_rounds_as_it_says(clock: Clock) -> None:
    layer_times([clock.layer("only", [1.0] * (ROUNDS + 1))])
    assert len(clock.calls) == ROUNDS + 1


def test_no_layers(clock: Clock) -> None:
    assert layer_times([]) == []
