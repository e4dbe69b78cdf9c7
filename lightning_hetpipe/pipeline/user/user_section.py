"""Sections of user code, and the process-wide state that each minibatch's sections have of their own (laws L7 and L8).

``training_step`` of minibatch p runs in sections. Between them, other minibatches' sections and Lightning's own thread
run. So each minibatch has its own copy of state of the whole process, swapped in while its sections run.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import BitGenerator
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor

from lightning_hetpipe.accelerator import default_generators


class UserSection:
    """State that is swapped in and out around each section of one minibatch's user code, by ``begin`` and ``end``. By
    default nothing is swapped."""

    def __init__(self, begin: Callable[[], object] = bool, end: Callable[[], object] = bool) -> None:
        self._begin, self._end = begin, end

    def enter(self) -> None:
        self._begin()

    def leave(self, for_good: bool = False) -> None:
        """End the section. ``for_good`` is True for the minibatch's last section."""
        self._end()


class UserSections(UserSection):
    """Several sections as one. The last to enter is the first to leave, and all leave even if one raises an error."""

    def __init__(self, sections: Sequence[UserSection]) -> None:
        self._sections = sections

    def enter(self) -> None:
        for section in self._sections:
            section.enter()

    def leave(self, for_good: bool = False) -> None:
        with ExitStack() as stack:
            for section in self._sections:
                stack.callback(section.leave, for_good)


class ProcessSection(UserSection):
    """A process state for the sections of one minibatch, which begins as ``state``."""

    def __init__(self, state: ProcessState) -> None:
        self._own = state
        self._seed = state.seed
        self._others: ProcessState | None = None

    def enter(self) -> None:
        self._others = ProcessState.taken()
        self._outer, _Seed.given = _Seed.given, self._seed
        if self._own.numpy is None:  # the others' generator waits for them
            set_bit_generator(spare_generator())
        self._own.restore()

    def leave(self, for_good: bool = False) -> None:
        others, self._others = self._others, None
        if others is None:  # its last `enter` has failed
            return
        if for_good:
            give_back(get_bit_generator())
        else:
            self._own = ProcessState.taken()
        others.restore()
        _Seed.given = self._outer


class _Seed:
    """Our seed for the user code that runs now, if any: only one section runs at a time (law L8)."""

    given: int | None = None


def has_own_seed() -> bool:
    """Return True if the calling user code has set a seed of torch's, of any device, since its minibatch began."""
    return _Seed.given is not None and any(seed != _Seed.given for seed in seeds_of_torch())


def seeds_of_torch() -> list[int]:
    """Return the seeds of torch's default generators, of every device."""
    return [generator.initial_seed() for generator in _generators()]


def states_of_torch() -> list[Tensor]:
    """Return the states of torch's default generators, of every device."""
    return [generator.get_state() for generator in _generators()]


def _generators() -> tuple[torch.Generator, ...]:
    return (torch.default_generator, *default_generators())


@contextmanager
def own_state(state: ProcessState) -> Iterator[None]:
    """Context manager in which the process has ``state``, for user code in Lightning's own thread."""
    section = ProcessSection(state)
    section.enter()
    try:
        yield
    finally:
        section.leave(for_good=True)


@dataclass(frozen=True)
class ProcessState:
    """Torch's, Python's and numpy's default random state, and torch's default dtype. Without a state of ``numpy``,
    ``seed`` makes all random states."""

    dtype: torch.dtype
    seed: int = 0
    generators: Sequence[Tensor] = ()
    python: Any = None
    numpy: NumpyState | None = None

    @staticmethod
    def taken() -> ProcessState:
        return ProcessState(torch.get_default_dtype(), 0, states_of_torch(), random.getstate(), NumpyState.taken())

    @staticmethod
    def seeded(run_seed: int, virtual_worker: int, minibatch: int | str) -> ProcessState:
        """Return the state at the start of ``minibatch``'s user step: the process's, except for random states."""
        name = f"training_step|{run_seed}|{virtual_worker}|{minibatch}"
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        return ProcessState(torch.get_default_dtype(), seed)

    def restore(self) -> None:
        if self.numpy is None:
            for generator in _generators():
                generator.manual_seed(self.seed)
            random.seed(self.seed)
            seed_numpy(self.seed)
        else:
            # Accelerators have none until the process uses one, which may be after this state was taken.
            for generator, state in zip(_generators(), self.generators, strict=False):
                generator.set_state(state)
            random.setstate(self.python)
            self.numpy.restore()
        torch.set_default_dtype(self.dtype)


# Numpy's state is handed from one section to the next without a copy. To copy its 624 words takes 35 us on a quiet
# machine, and to set them as long (*measured*): together as much as a small model's loss, twice for each section. So
# sections exchange the bit generators that hold the words. Beside its bit generator numpy keeps the second of a pair of
# normal numbers, and tells it only together with all words: it is asked for only where a word was drawn since numpy was
# last known to keep none.

BYTES = 625 * 4
"""Size of the state of numpy's MT19937 in bytes: 624 words, and the place of the next one."""

_spare: list[BitGenerator] = []
_unpaired: tuple[BitGenerator, bytes] | None = None  # the default generator, and its words when numpy kept no second


@dataclass(frozen=True)
class NumpyState:
    """State of numpy's default ``generator``, which may be the user's. ``paired`` is numpy's full state if
    numpy keeps the second of a pair of normal numbers, otherwise None."""

    generator: BitGenerator
    paired: dict[str, Any] | None

    @staticmethod
    def taken() -> NumpyState:
        generator = get_bit_generator()
        if _unpaired is None or _unpaired[0] is not generator or _unpaired[1] != _words(generator):
            state = np.random.get_state(legacy=False)
            if state["has_gauss"]:
                return NumpyState(generator, state)
        return NumpyState(generator, None)

    def restore(self) -> None:
        set_bit_generator(self.generator)  # numpy forgets the second number
        if self.paired is None:
            _note_unpaired()
        else:
            np.random.set_state(self.paired)


def seed_numpy(seed: int) -> None:
    """Seed the process's generator as ``numpy.random.seed`` does, even in place of a generator of the user's."""
    if type(get_bit_generator()) is not np.random.MT19937:  # numpy can seed no other one
        set_bit_generator(spare_generator())
    np.random.seed(seed)
    _note_unpaired()


def spare_generator() -> BitGenerator:
    """Return an unused bit generator in any state."""
    return _spare.pop() if _spare else np.random.MT19937()


def give_back(generator: BitGenerator) -> None:
    """Keep ``generator``, which is unused from now on, for :func:`spare_generator`."""
    if type(generator) is np.random.MT19937:
        _spare.append(generator)


def _note_unpaired() -> None:
    global _unpaired
    generator = get_bit_generator()
    words = _words(generator)
    _unpaired = None if words is None else (generator, words)


def _words(generator: BitGenerator) -> bytes | None:
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, BYTES)
