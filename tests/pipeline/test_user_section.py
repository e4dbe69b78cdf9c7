"""A section of user code has random states and a default dtype of its own, swapped in while it runs."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from lightning_hetpipe.pipeline.user import user_section
from lightning_hetpipe.pipeline.user.user_section import (
    BYTES,
    ProcessSection,
    ProcessState,
    UserSection,
    UserSections,
    has_own_seed,
    own_state,
)


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    with own_state(ProcessState.seeded(0, 0, "test")):
        yield


def draw() -> tuple[float, float, float, torch.dtype]:
    """One number from each default generator, and the dtype of a new tensor."""
    return torch.rand(1, dtype=torch.float64).item(), random.random(), np.random.rand(), torch.zeros(1).dtype


def test_sections_in_turns_draw_as_if_each_was_alone() -> None:
    """Numbers of every generator, numpy's in pairs too, which it keeps beside its bit generator."""

    def numbers() -> list[Any]:
        return [draw(), np.random.randn(), np.random.randint(1000), np.random.randn(3).tolist()]

    def alone(minibatch: int) -> list[Any]:
        ProcessState.seeded(7, 0, minibatch).restore()
        return [numbers() for _ in range(5)]

    expected = {minibatch: alone(minibatch) for minibatch in range(4)}
    ProcessState.seeded(7, 0, 0).restore()
    found: dict[int, list[Any]] = {minibatch: [] for minibatch in range(4)}
    for first in (1, 2):  # the generator of a section that has ended serves the next one
        sections = {minibatch: ProcessSection(ProcessState.seeded(7, 0, minibatch)) for minibatch in (first, 3)}
        found[3].clear()
        for turn in range(5):
            for minibatch, section in sections.items():
                section.enter()
                found[minibatch].append(numbers())
                section.leave(for_good=turn == 4)
    found[0] = [numbers() for _ in range(5)]  # the process's own
    assert found == expected


@pytest.mark.parametrize("draw_again", [np.random.randn, np.random.standard_exponential, np.random.rand, torch.rand])
def test_a_second_number_is_found_wherever_it_was_drawn(draw_again: Callable[[int], Any]) -> None:
    """A section may take the second of a pair without drawing a word."""
    np.random.seed(1)
    expected = np.random.randn(4).tolist()
    np.random.seed(1)
    found = [np.random.randn()]  # leaves a second one
    for _ in range(2):
        with own_state(ProcessState.seeded(7, 0, 1)):
            draw_again(3)
    found.append(np.random.randn())  # the second one, without a word
    with own_state(ProcessState.seeded(7, 0, 1)):
        draw_again(1)
    assert [*found, *np.random.randn(2).tolist()] == expected


def test_numpys_words_show_each_draw() -> None:
    """The words are where numpy says, in the size that is assumed."""
    generator = np.random.MT19937(3)
    words = {ctypes.string_at(generator.ctypes.state_address, BYTES)}
    for _ in range(700):  # past the end of the 624 words, which are then made anew
        generator.random_raw()
        words.add(ctypes.string_at(generator.ctypes.state_address, BYTES))
    assert len(words) == 701
    state = generator.state["state"]
    assert words >= {state["key"].tobytes() + np.int32(state["pos"]).tobytes()}


def test_a_stretch_that_goes_on_draws_as_if_it_was_alone() -> None:
    ProcessState.seeded(7, 0, 1).restore()
    torch.set_default_dtype(torch.float64)
    expected = [draw() for _ in range(3)]
    torch.set_default_dtype(torch.float32)

    section, outside, found = ProcessSection(ProcessState.seeded(7, 0, 1)), [], []
    ProcessState.seeded(1, 0, 0).restore()
    for turn in range(3):
        section.enter()
        if turn == 0:
            torch.set_default_dtype(torch.float64)
        found.append(draw())
        section.leave()
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
    ProcessState.seeded(3, 0, 1).restore()
    first = draw()
    ProcessState.seeded(3, 0, 1).restore()
    ProcessState.seeded(7, 0, 1)
    assert draw() == first


def test_the_second_of_a_pair_of_normal_numbers_stays_with_whom_it_is_of() -> None:
    """numpy draws them in pairs, and keeps the second beside its bit generator."""

    def normals(seed: int) -> list[float]:
        return list(np.random.RandomState(seed).standard_normal(6))

    np.random.seed(1)
    expected = normals(1)
    found, outside = [], []
    section = ProcessSection(ProcessState.seeded(7, 0, 1))
    for turn in range(3):
        outside.append(np.random.randn())
        section.enter()
        if turn == 0:
            np.random.seed(2)
        found.append(np.random.randn())
        section.leave()
        outside.append(np.random.randn())
    assert outside == expected
    assert found == normals(2)[:3]


def test_a_bit_generator_of_the_users_own_is_given_back() -> None:
    mine = np.random.PCG64(3)
    before = get_bit_generator()
    set_bit_generator(mine)
    try:
        section = ProcessSection(ProcessState.seeded(7, 0, 1))
        section.enter()
        np.random.rand()
        section.leave()
        assert get_bit_generator() is mine
        assert np.random.rand() == np.random.RandomState(np.random.PCG64(3)).rand()
    finally:
        set_bit_generator(before)


def test_what_a_stretch_sees_of_numpys_state_is_all_of_it() -> None:
    section = ProcessSection(ProcessState.seeded(7, 0, 1))
    section.enter()
    try:
        state = np.random.get_state()
        first = np.random.rand(3)
        np.random.set_state(state)
        assert (np.random.rand(3) == first).all()
        np.random.set_state(np.random.RandomState(5).get_state())
        assert np.random.rand() == np.random.RandomState(5).rand()
    finally:
        section.leave()


def test_a_minibatch_has_random_numbers_of_its_own_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that training_step draws there must not depend on whose section comes first."""
    gpu = torch.Generator().manual_seed(5)
    monkeypatch.setattr(user_section, "default_generators", lambda: (gpu,))

    def noise() -> list[float]:
        return torch.rand(2, generator=gpu).tolist()

    def turns(order: list[int]) -> list[list[float]]:
        sections = [ProcessSection(ProcessState.seeded(7, 0, minibatch)) for minibatch in (1, 2)]
        found: list[list[float]] = [[], []]
        for index in order:
            sections[index].enter()
            found[index] += noise()
            sections[index].leave()
        return found

    first = turns([0, 0, 1, 1])
    assert first[0] != first[1]
    assert turns([0, 1, 0, 1]) == turns([1, 0, 1, 0]) == first
    assert noise() == torch.rand(2, generator=torch.Generator().manual_seed(5)).tolist(), (
        "the process's goes on as it was"
    )


def test_a_gpu_that_is_first_used_within_a_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_section, "default_generators", tuple)
    section = ProcessSection(ProcessState.seeded(7, 0, 1))
    section.enter()
    generators = (torch.Generator().manual_seed(5),)
    monkeypatch.setattr(user_section, "default_generators", lambda: generators)
    section.leave()
    section.enter()
    section.leave(for_good=True)


def test_all_sections_leave_whatever_one_raises() -> None:
    """The process's state would stay swapped: the next run would draw from that of the minibatch that failed."""

    class Refuses(UserSection):
        def leave(self, for_good: bool = False) -> None:
            raise LookupError

    outside = torch.get_rng_state()
    sections = UserSections([ProcessSection(ProcessState.seeded(7, 0, 1)), Refuses()])
    sections.enter()
    with pytest.raises(LookupError):
        sections.leave()
    assert torch.equal(torch.get_rng_state(), outside)
    assert not has_own_seed()
