"""Modules that were taken apart: their own code runs as user code in runners' threads, around the pieces in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack

from torch import nn

from lightning_hetpipe.pipeline.random.generators import RandomGenerators, attached
from lightning_hetpipe.run.lifecycle import Around, Extension


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
