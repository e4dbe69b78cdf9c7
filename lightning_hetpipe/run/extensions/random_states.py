"""Random numbers of user code: each minibatch has states of the process and generators of its own (laws L7 and L8)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack

from torch import nn

from lightning_hetpipe.pipeline.random.generators import RandomGenerators, attached
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


class ModulesApart(Extension):
    """Has ``modules`` draw from the minibatch's generators, as they would in a stage (law L7), unless they set a seed.

    There may be no modules.

    Args:
        modules: The outermost ones, by their paths.
        pieces: The pipelined modules, among them those in ``modules``.
        generators: The run's random generators.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], pieces: Collection[nn.Module], generators: RandomGenerators
    ) -> None:
        self._generators = generators
        self._attached = ExitStack()
        self._attached.enter_context(attached(modules, _inside(pieces)))

    def user_step(self, minibatch: int) -> Around:
        return self._generators.minibatch(minibatch, in_user_code=True)

    def closed(self) -> None:
        self._attached.close()


def user_parts(modules: Iterable[nn.Module], pieces: Iterable[nn.Module]) -> list[nn.Module]:
    """The parts of ``modules``, outside the ``pieces``, whose own code runs as user code and may set attributes."""
    inside = _inside(pieces)
    found = {part: None for module in modules for part in module.modules() if part not in inside}
    return [part for part in found if not type(part).__module__.startswith("torch.nn.modules.")]


def _inside(pieces: Iterable[nn.Module]) -> set[nn.Module]:
    return {part for piece in pieces for part in piece.modules()}
