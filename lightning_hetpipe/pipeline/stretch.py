"""What a stretch of user code sees of the process: its own random state and default dtype (laws L7 and L8).

``training_step`` of minibatch p runs in stretches, between which other minibatches' stretches and Lightning's own
thread run. Some state belongs to the whole process; each minibatch gets its own of that, swapped in while it runs.
"""

from __future__ import annotations

import hashlib
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Stretch:
    """The process-wide state of one minibatch's user code: swapped in while it runs, and out while it waits."""

    def __init__(self, state: ProcessState) -> None:
        self._mine = state
        self._others: ProcessState | None = None

    def enter(self) -> None:
        self._others = ProcessState.current()
        self._mine.restore()

    def leave(self) -> None:
        assert self._others is not None
        self._mine = ProcessState.current()
        self._others.restore()


@dataclass
class ProcessState:
    """Torch's, Python's and (where it was imported) numpy's default random state, and torch's default dtype."""

    torch_random: Tensor
    python_random: Any
    numpy_random: Any
    dtype: torch.dtype

    @staticmethod
    def current() -> ProcessState:
        numpy = sys.modules.get("numpy")
        return ProcessState(
            torch_random=torch.get_rng_state(),
            python_random=random.getstate(),
            numpy_random=numpy.random.get_state() if numpy else None,
            dtype=torch.get_default_dtype(),
        )

    @staticmethod
    def seeded(run_seed: int, virtual_worker: int, minibatch: int | str) -> ProcessState:
        """What the user's step of ``minibatch`` starts with: the process's state, but random state of its own."""
        name = f"training_step|{run_seed}|{virtual_worker}|{minibatch}"
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        numpy = sys.modules.get("numpy")
        return ProcessState(
            torch_random=torch.Generator().manual_seed(seed).get_state(),
            python_random=random.Random(seed).getstate(),
            numpy_random=numpy.random.RandomState(seed).get_state() if numpy else None,
            dtype=torch.get_default_dtype(),
        )

    def restore(self) -> None:
        torch.set_rng_state(self.torch_random)
        random.setstate(self.python_random)
        if self.numpy_random is not None:
            sys.modules["numpy"].random.set_state(self.numpy_random)
        torch.set_default_dtype(self.dtype)
