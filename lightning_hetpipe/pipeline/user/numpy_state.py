"""State of numpy's default random generator, handed from one section of user code to the next without a copy.

To copy its 624 words takes 35 us on a quiet machine, and to set them as long (*measured*): together as much as a small
model's loss, twice for each section. So sections exchange the bit generators that hold the words. Beside its bit
generator numpy keeps the second of a pair of normal numbers, and tells it only together with all words: it is asked
for only where a word was drawn since numpy was last known to keep none.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import BitGenerator
from numpy.random.mtrand import get_bit_generator, set_bit_generator

BYTES = 625 * 4
"""Size of the state of numpy's MT19937: 624 words, and the place of the next one."""

_spare: list[BitGenerator] = []
_unpaired: tuple[BitGenerator, bytes] | None = None  # the default generator, and its words when numpy kept no second


@dataclass(frozen=True)
class NumpyState:
    """State of numpy's default generator.

    Attributes:
        generator: The bit generator, which may be one of the user's.
        paired: All of numpy's state, where it keeps the second of a pair of normal numbers.
    """

    generator: BitGenerator
    paired: dict[str, Any] | None

    @staticmethod
    def taken() -> NumpyState:
        """Take the process's state, which is replaced next."""
        generator = get_bit_generator()
        if _unpaired is None or _unpaired[0] is not generator or _unpaired[1] != _words(generator):
            state = np.random.get_state(legacy=False)
            if state["has_gauss"]:
                return NumpyState(generator, state)
        return NumpyState(generator, None)

    def restore(self) -> None:
        """Make the process's state this one."""
        set_bit_generator(self.generator)  # numpy forgets the second number
        if self.paired is None:
            _note_unpaired()
        else:
            np.random.set_state(self.paired)


def seed_numpy(seed: int) -> None:
    """Seed the process's generator as ``numpy.random.seed`` does, in place of one of the user's too."""
    if type(get_bit_generator()) is not np.random.MT19937:  # numpy can seed no other one
        set_bit_generator(spare_generator())
    np.random.seed(seed)
    _note_unpaired()


def spare_generator() -> BitGenerator:
    """A bit generator that nobody uses, in any state."""
    return _spare.pop() if _spare else np.random.MT19937()


def give_back(generator: BitGenerator) -> None:
    """Keep ``generator``, which nobody uses any more, for :func:`spare_generator`."""
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
