"""Random states of the process while user code runs: each minibatch has its own (laws L7 and L8)."""

from __future__ import annotations

from collections.abc import Callable

from lightning_hetpipe.pipeline.user.user_section import ProcessSection, ProcessState, UserSection, own_state
from lightning_hetpipe.run.lifecycle import Around, Extension


class RandomStates(Extension):
    """Swaps in what the user code of a minibatch has of the process: at its beginning ``state`` of its number."""

    def __init__(self, state: Callable[[int], ProcessState]) -> None:
        self._state = state

    def section(self, minibatch: int) -> UserSection:
        return ProcessSection(self._state(minibatch))


class InlineRandomStates(Extension):
    """Gives the user's step in Lightning's own thread random states of its minibatch, as sections in runners have.

    So it draws the same numbers where a run is resumed. ``state`` makes those of a minibatch.
    """

    def __init__(self, state: Callable[[int], ProcessState]) -> None:
        self._state = state

    def inline_step(self, minibatch: int) -> Around:
        return own_state(self._state(minibatch))
