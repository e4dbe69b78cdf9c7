"""Modules that were taken apart: their own code runs as user code in runners' threads, around the pieces in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack

from torch import nn

from lightning_hetpipe.pipeline.random.generators import RandomGenerators, attached
from lightning_hetpipe.run.lifecycle import Around, Extension


class ModulesApart(Extension):
    """Has ``modules`` draw from the minibatch's generators, as they would in a stage (law L7).

    Args:
        modules: The outermost ones, by their paths.
        pieces: The pipelined modules, among them those in ``modules``.
        generators: The run's random generators.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], pieces: Collection[nn.Module], generators: RandomGenerators
    ) -> None:
        self._generators = generators
        self._inside = {part for piece in pieces for part in piece.modules()}
        self._modules = list(modules.values())
        self._attached = ExitStack()
        self._attached.enter_context(attached(modules, self._inside))

    def parts(self) -> Iterator[nn.Module]:
        """The modules whose code is the user's, outside the pieces: these may set attributes of their own."""
        found = {part: None for module in self._modules for part in module.modules() if part not in self._inside}
        return (part for part in found if not type(part).__module__.startswith("torch.nn.modules."))

    def user_step(self, minibatch: int) -> Around:
        return self._generators.minibatch(minibatch)

    def closed(self) -> None:
        self._attached.close()
