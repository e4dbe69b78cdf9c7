"""Sections of user code, and the process-wide state that each minibatch's have of their own (laws L7 and L8).

``training_step`` of minibatch p runs in sections, between which other minibatches' sections and Lightning's own thread
run. Some state belongs to the whole process: each minibatch gets its own of that, swapped in while its sections run.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.random import BitGenerator
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor


class UserSection(Protocol):
    """State that is swapped in and out around each section of one minibatch's user code."""

    def enter(self) -> None: ...

    def leave(self, for_good: bool = False) -> None:
        """End the section; ``for_good`` where it was the minibatch's last one."""


class UserSections:
    """Several of these as one; the last one to enter is the first to leave."""

    def __init__(self, sections: Sequence[UserSection]) -> None:
        self._sections = sections

    def enter(self) -> None:
        for section in self._sections:
            section.enter()

    def leave(self, for_good: bool = False) -> None:
        for section in reversed(self._sections):
            section.leave(for_good)


NO_SECTION: UserSection = UserSections(())
"""Swaps nothing."""


class ProcessSection:
    """Gives the sections of one minibatch a process state of their own, which begins as ``state``."""

    def __init__(self, state: ProcessState) -> None:
        self._own = state
        self._others: ProcessState | None = None

    def enter(self) -> None:
        self._others = ProcessState.current()
        self._own.restore()

    def leave(self, for_good: bool = False) -> None:
        assert self._others is not None
        if not for_good:
            self._own = ProcessState.current()
        self._others.restore()


@dataclass(frozen=True)
class ProcessState:
    """Torch's, Python's and numpy's default random state, and torch's default dtype.

    Attributes:
        dtype: Torch's default dtype.
        seed: Makes all random states, where ``random`` is None.
        random: The random states themselves.
    """

    dtype: torch.dtype
    seed: int = 0
    random: _RandomStates | None = None

    @staticmethod
    def current() -> ProcessState:
        """A copy of what the process has."""
        return ProcessState(torch.get_default_dtype(), random=_RandomStates.current())

    @staticmethod
    def seeded(run_seed: int, virtual_worker: int, minibatch: int | str) -> ProcessState:
        """The state that the user's step of ``minibatch`` starts with: the process's, but for random states."""
        name = f"training_step|{run_seed}|{virtual_worker}|{minibatch}"
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        return ProcessState(torch.get_default_dtype(), seed)

    def restore(self) -> None:
        """Make the process's state a copy of this one."""
        if self.random is None:
            _seed(self.seed)
        else:
            self.random.restore()
        torch.set_default_dtype(self.dtype)


@dataclass(frozen=True)
class _RandomStates:
    torch: Tensor
    cuda: Sequence[Tensor]
    python: Any
    numpy: tuple[BitGenerator, dict[str, Any]]  # the generator too, as user code may have set one of its own

    @staticmethod
    def current() -> _RandomStates:
        cuda = [generator.get_state() for generator in torch.cuda.default_generators]
        numpy = (get_bit_generator(), np.random.get_state(legacy=False))
        return _RandomStates(torch.get_rng_state(), cuda, random.getstate(), numpy)

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        # There are none until the process uses a GPU, which may be after this state was taken.
        for generator, state in zip(torch.cuda.default_generators, self.cuda, strict=False):
            generator.set_state(state)
        random.setstate(self.python)
        bits, numbers = self.numpy
        if bits is not get_bit_generator():
            set_bit_generator(bits)
        np.random.set_state(numbers)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    for generator in torch.cuda.default_generators:
        generator.manual_seed(seed)
    random.seed(seed)
    if type(get_bit_generator()) is not np.random.MT19937:  # numpy can seed no other one
        set_bit_generator(np.random.MT19937())
    np.random.seed(seed)
