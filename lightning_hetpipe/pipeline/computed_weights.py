"""Weights that ``torch.nn.utils`` computes before each forward: pruned, and old weight or spectral norm (law L9).

Such a ``weight`` is a plain tensor that a hook makes from ``weight_orig`` and the like. Stages compute it on their
copies, while whoever looks at the live layers (Lightning's ModelPruning, say, when it prunes further) expects to find
what the last forward has left there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from lightning_hetpipe.pipeline.buffers import Place

_SOURCES = ("_orig", "_g", "_v")


def computed_names(module: nn.Module) -> list[str]:
    """The attributes of ``module`` itself that hold a tensor computed from its parameters."""
    parameters = module.named_parameters(recurse=False)
    sources = {name.rsplit("_", 1)[0] for name, _ in parameters if name.endswith(_SOURCES)}
    return [name for name, value in vars(module).items() if name in sources and isinstance(value, Tensor)]


def computed_places(layers: Iterable[nn.Module]) -> list[Place]:
    """Every computed weight in ``layers``; a shared module's once."""
    return [(module, name) for module in nn.ModuleList(layers).modules() for name in computed_names(module)]


class Computed:
    """The computed weights of one segment: those of the last ``kept`` forwards."""

    def __init__(self, kept: int) -> None:
        self._left: list[Sequence[Tensor]] = [()] * kept

    def after_forward(self, minibatch: int, layers: list[Place]) -> None:
        """Keeps what forward ``minibatch`` has computed in ``layers``, without its graph."""
        if layers:
            self._left[minibatch % len(self._left)] = [getattr(*place).detach() for place in layers]

    def left(self, minibatch: int) -> Sequence[Tensor]:
        """Weights that forward ``minibatch`` has computed."""
        return self._left[minibatch % len(self._left)]

    def let_go(self) -> None:
        """Forgets what forwards have computed."""
        self._left = [() for _ in self._left]
