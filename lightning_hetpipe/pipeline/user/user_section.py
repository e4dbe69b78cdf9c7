"""What a stretch of user code sees of the process: its own random state and default dtype (laws L7 and L8).

``training_step`` of minibatch p runs in stretches, between which other minibatches' stretches and Lightning's own
thread run. Some state belongs to the whole process; each minibatch gets its own of that, swapped in while it runs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.random import BitGenerator, SeedSequence
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor


class UserSection(Protocol):
    """State that is swapped in and out around each section of one minibatch's user code."""

    def enter(self) -> None: ...

    def leave(self, for_good: bool = False) -> None:
        """The section is over; ``for_good`` where it was the minibatch's last one."""


class UserSections:
    """Several sections as one; the last one to enter is the first to leave."""

    def __init__(self, sections: Sequence[UserSection]) -> None:
        self._sections = sections

    def enter(self) -> None:
        for section in self._sections:
            section.enter()

    def leave(self, for_good: bool = False) -> None:
        for section in reversed(self._sections):
            section.leave(for_good)


class Stretch:
    """The process-wide state of one minibatch's user code: swapped in while it runs, and out while it waits."""

    def __init__(self, state: ProcessState) -> None:
        self._mine = state
        self._others: ProcessState | None = None

    def enter(self) -> None:
        self._others = self._mine.exchange()

    def leave(self, for_good: bool = False) -> None:
        """Lets others run; ``for_good`` where the user code has ended, so that nothing need be kept of its state."""
        assert self._others is not None
        if for_good:
            self._others.take_over()
        else:
            self._mine = self._others.exchange()


@dataclass
class ProcessState:
    """Torch's, Python's and numpy's default random state, and torch's default dtype.

    Attributes:
        seed: Makes Torch's and Python's random state, where these are None.
        gpu_random: Torch's on each GPU; none as long as it uses none.
    """

    numpy_random: NumpyRandom
    dtype: torch.dtype
    torch_random: Tensor | None = None
    python_random: Any = None
    seed: int = 0
    gpu_random: Sequence[Tensor] = ()

    @staticmethod
    def current() -> ProcessState:
        """A copy of what the process has."""
        return _process_state(NumpyRandom(state=np.random.get_state(legacy=False)))

    @staticmethod
    def seeded(run_seed: int, virtual_worker: int, minibatch: int | str) -> ProcessState:
        """What the user's step of ``minibatch`` starts with: the process's state, but random state of its own."""
        name = f"training_step|{run_seed}|{virtual_worker}|{minibatch}"
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        return ProcessState(NumpyRandom(seed=seed), torch.get_default_dtype(), seed=seed)

    def restore(self) -> None:
        """Makes the process's state a copy of this one."""
        self.numpy_random.restore()
        self._restore_others()

    def exchange(self) -> ProcessState:
        """Makes the process's state this one, which goes on changing with it; gives what it was before."""
        before = _process_state(_taken())
        self.take_over()
        return before

    def take_over(self) -> None:
        """Makes the process's state this one, which goes on changing with it."""
        self.numpy_random.take_over()
        self._restore_others()

    def _restore_others(self) -> None:
        if self.torch_random is None:
            torch.default_generator.manual_seed(self.seed)
            random.seed(self.seed)
            for generator in torch.cuda.default_generators:
                generator.manual_seed(self.seed)
        else:
            torch.set_rng_state(self.torch_random)
            random.setstate(self.python_random)
            # There are none until the process uses a GPU, which may be after this state was taken.
            for generator, state in zip(torch.cuda.default_generators, self.gpu_random, strict=False):
                generator.set_state(state)
        torch.set_default_dtype(self.dtype)


def _process_state(numpy_random: NumpyRandom) -> ProcessState:
    gpu_random = [generator.get_state() for generator in torch.cuda.default_generators]
    dtype, torch_random = torch.get_default_dtype(), torch.get_rng_state()
    return ProcessState(numpy_random, dtype, torch_random, random.getstate(), gpu_random=gpu_random)


class NumpyRandom:
    """A state of numpy's default generator.

    To copy its 624 numbers takes 35 us (90 us after a pause, in which the processor's caches have forgotten us), and to
    set them as long: as much as a small model's loss. So stretches exchange the bit generators that hold them.

    Args:
        seed: As ``numpy.random.seed`` would leave it; otherwise give ``state``.
        state: As ``numpy.random.get_state(legacy=False)`` gives it.
        bits: What holds it already, but for the second of a pair of normal numbers: ``state`` is given if there is one.
    """

    def __init__(
        self, seed: int | None = None, state: dict[str, Any] | None = None, bits: BitGenerator | None = None
    ) -> None:
        self._seed = seed
        self._state = state
        self._bits = bits

    def restore(self) -> None:
        """Makes the process's state a copy of this one."""
        if self._seed is not None:
            np.random.seed(self._seed)
        if self._state is not None:
            np.random.set_state(self._state)

    def take_over(self) -> None:
        """Makes the process's state this one, which goes on changing with it."""
        set_bit_generator(MT19937() if self._bits is None else self._bits)
        self.restore()


class MT19937(np.random.MT19937):
    """numpy's, that can hide its numbers from who asks for what numpy keeps beside them. numpy wants this name."""

    hidden = False

    def __init__(self, seed: SeedSequence | None = None) -> None:
        super().__init__(_UNSEEDED if seed is None else seed)

    @property
    def state(self) -> Any:
        return {"bit_generator": "MT19937"} if self.hidden else _STATE.__get__(self)

    @state.setter
    def state(self, state: Any) -> None:
        _STATE.__set__(self, state)


def _taken() -> NumpyRandom:
    """The process's state, which must be replaced next."""
    bits = get_bit_generator()
    if isinstance(bits, MT19937):
        bits.hidden = True
        try:
            second = np.random.get_state(legacy=False)["has_gauss"]
        finally:
            bits.hidden = False
        return NumpyRandom(bits=bits, state=np.random.get_state(legacy=False) if second else None)
    state = np.random.get_state(legacy=False)
    if type(bits) is np.random.MT19937:  # from now on the process has one of ours, which goes on alike
        held, bits = bits, MT19937()
        bits.state = held.state
    return NumpyRandom(bits=bits, state=state if state["has_gauss"] else None)


class _Unseeded(SeedSequence):
    """Spares a generator that is seeded later the 90 us of doing so now."""

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return [0] * n_words


_UNSEEDED = _Unseeded(0)
_STATE: Any = np.random.MT19937.state  # the property of numpy's class
