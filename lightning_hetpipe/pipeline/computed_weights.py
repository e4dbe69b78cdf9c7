"""Weights that ``torch.nn.utils`` computes before each forward: pruned, and old weight or spectral norm (law L9).

Such a ``weight`` is a plain tensor that a hook makes from ``weight_orig`` and the like. Stages compute it on their
copies, or in a graph, while whoever looks at the live layers (Lightning's ModelPruning, say, when it prunes further)
expects to find what the last forward has left there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from torch import Tensor, nn

from lightning_hetpipe.torch_private.modules import computing_hooks

_SOURCES = ("_orig", "_g", "_v")


def computed_names(module: nn.Module) -> list[str]:
    """The attributes of ``module`` itself that hold a tensor computed from its parameters."""
    parameters = module.named_parameters(recurse=False)
    sources = {name.rsplit("_", 1)[0] for name, _ in parameters if name.endswith(_SOURCES)}
    return [name for name, value in vars(module).items() if name in sources and isinstance(value, Tensor)]


def compute(module: nn.Module, weights: Callable[[nn.Parameter], Tensor]) -> None:
    """Makes the computed weights of ``module`` what a forward on other ``weights`` has left, which has also left its
    buffers."""
    own = SimpleNamespace(training=False)  # spectral norm iterates in training, as the forward has done
    for name, parameter in module.named_parameters(recurse=False):
        setattr(own, name, weights(parameter))
    for name, buffer in module.named_buffers(recurse=False):
        setattr(own, name, buffer)
    for hook in computing_hooks(module):
        hook(own, ())
    for name in computed_names(module):
        setattr(module, name, getattr(own, name))
