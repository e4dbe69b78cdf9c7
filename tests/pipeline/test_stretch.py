"""A stretch of user code has random states and a default dtype of its own, swapped in while it runs."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightning_hetpipe.pipeline.stretch import ProcessState, Stretch


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    before = ProcessState.current()
    yield
    before.restore()


def draw() -> tuple[float, float, float, torch.dtype]:
    """One number from each default generator, and the dtype of a new tensor."""
    return torch.rand(1, dtype=torch.float64).item(), random.random(), np.random.rand(), torch.zeros(1).dtype


def test_restoring_repeats_what_came_after() -> None:
    state = ProcessState.current()
    first = draw()
    torch.set_default_dtype(torch.float64)
    draw()
    state.restore()
    assert draw() == first


def test_a_state_is_a_copy() -> None:
    state = ProcessState.current()
    first = draw()
    for _ in range(2):
        state.restore()
        assert draw() == first


def test_stretches_in_turns_draw_as_if_each_was_alone() -> None:
    def alone(minibatch: int) -> list[Any]:
        ProcessState.seeded(7, 0, minibatch).restore()
        return [draw() for _ in range(3)]

    expected = [alone(1), alone(2)]
    states = [ProcessState.seeded(7, 0, 1), ProcessState.seeded(7, 0, 2)]
    outside = ProcessState.current()
    found: list[list[Any]] = [[], []]
    for _ in range(3):
        for index in (0, 1):
            states[index].restore()
            found[index].append(draw())
            states[index] = ProcessState.current()
            outside.restore()
    assert found == expected


def test_a_stretch_that_goes_on_draws_as_if_it_was_alone() -> None:
    ProcessState.seeded(7, 0, 1).restore()
    torch.set_default_dtype(torch.float64)
    expected = [draw() for _ in range(3)]
    torch.set_default_dtype(torch.float32)

    stretch, outside, found = Stretch(ProcessState.seeded(7, 0, 1)), [], []
    ProcessState.seeded(1, 0, 0).restore()
    for turn in range(3):
        stretch.enter()
        if turn == 0:
            torch.set_default_dtype(torch.float64)
        found.append(draw())
        stretch.leave()
        outside.append(draw())
    assert found == expected
    ProcessState.seeded(1, 0, 0).restore()
    assert outside == [draw() for _ in range(3)]
    assert outside[0][-1] is torch.float32


@pytest.mark.parametrize("other", [(8, 0, 1), (7, 1, 1), (7, 0, 2)])
def test_seeds_differ_by_run_worker_and_minibatch(other: tuple[int, int, int]) -> None:
    ProcessState.seeded(7, 0, 1).restore()
    first = draw()
    ProcessState.seeded(*other).restore()
    second = draw()
    assert [a != b for a, b in zip(first, second, strict=True)] == [True, True, True, False]


def test_a_seeded_state_repeats_and_keeps_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    state = ProcessState.seeded(7, 0, 1)
    torch.set_default_dtype(torch.float32)
    state.restore()
    first = draw()
    assert first[-1] is torch.float64
    random.random()
    ProcessState.seeded(7, 0, 1).restore()
    assert draw() == first


def test_making_a_seeded_state_draws_nothing() -> None:
    state = ProcessState.current()
    first = draw()
    state.restore()
    ProcessState.seeded(7, 0, 1)
    assert draw() == first


def test_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not imported for this, and what was not imported then is left alone later."""
    monkeypatch.delitem(sys.modules, "numpy")
    state, seeded = ProcessState.current(), ProcessState.seeded(7, 0, 1)
    monkeypatch.undo()
    drawn = np.random.get_state()
    expected = np.random.rand()
    np.random.set_state(drawn)
    seeded.restore()
    state.restore()
    assert np.random.rand() == expected
