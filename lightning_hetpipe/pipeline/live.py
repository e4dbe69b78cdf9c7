"""The live layers of one stage in Lightning's thread: versions are made of them, and observers look at them.

Some layers have tensors that ``torch.nn.utils`` computes before each forward (pruned weights, old weight or spectral
norm), in a hook, from ``weight_orig`` and similar parameters (law L9). Stages compute them on their copies, or in a
graph. Observers of the live layers, such as Lightning's ModelPruning, expect to find there what the last forward left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from types import SimpleNamespace

from torch import Tensor, nn

from lightning_hetpipe.pipeline.buffers import may_change, places, tensor_at
from lightning_hetpipe.pipeline.stage_messages import Flags, Move, Version
from lightning_hetpipe.rules.versions import Reading
from lightning_hetpipe.torch_private.modules import computing_hooks

Moves = Mapping[nn.Parameter, Move]
"""Expected changes of parameters by an optimizer step."""

NO_MOVES: Moves = {}


class Live:
    """The live layers of each segment of one stage, or parameters that no stage holds."""

    def __init__(self, segments: Sequence[Sequence[nn.Module]]) -> None:
        layers = nn.ModuleList([layer for segment in segments for layer in segment])
        self.parameters: list[nn.Parameter] = list(layers.parameters())
        self._modules = list(layers.modules())
        self._buffers = [places(segment) for segment in segments]
        self.shows = any(self._buffers)
        """True if forwards leave anything in the live layers."""

    def version(self, number: int, needed: Sequence[Reading], moves: Moves = NO_MOVES) -> Version:
        """Return the message that publishes the present weights and flags as version ``number``."""
        buffers = [[*map(tensor_at, own)] for own in self._buffers]
        own = [moves.get(parameter) for parameter in self.parameters] if moves else ()
        return Version(number, self.parameters, self.flags(), buffers, needed, own)

    def flags(self) -> Flags:
        return Flags(
            tuple([parameter.requires_grad for parameter in self.parameters]),
            tuple([module.training for module in self._modules]),
        )

    def show(self, state: Sequence[Sequence[Tensor]], shown: Sequence[bool] | None = None) -> None:
        """Set buffers to the ``state`` that a forward left, by segment: all, or only of segments to be ``shown``."""
        for own, left in compress(zip(self._buffers, state, strict=True), shown or [True] * len(self._buffers)):
            for place, tensor in zip(own, left, strict=True):
                if not may_change(*place):
                    continue
                live = tensor_at(place)
                if live.shape == tensor.shape and live.dtype == tensor.dtype:
                    live.copy_(tensor)
                else:
                    setattr(*place, tensor.to(live.device, copy=True))


_SOURCES = ("_orig", "_g", "_v")


def computed_names(module: nn.Module) -> list[str]:
    """Return the attributes of ``module`` itself that hold a tensor computed from its parameters."""
    parameters = module.named_parameters(recurse=False)
    sources = {name.rsplit("_", 1)[0] for name, _ in parameters if name.endswith(_SOURCES)}
    return [name for name, value in vars(module).items() if name in sources and isinstance(value, Tensor)]


def compute(module: nn.Module, weights: Callable[[nn.Parameter], Tensor]) -> None:
    """Compute what a forward on other ``weights`` left in ``module``, which has the forward's buffers already."""
    own = SimpleNamespace(training=False)  # in training, spectral norm would iterate again
    for name, parameter in module.named_parameters(recurse=False):
        setattr(own, name, weights(parameter))
    for name, buffer in module.named_buffers(recurse=False):
        setattr(own, name, buffer)
    for hook in computing_hooks(module):
        hook(own, ())
    for name in computed_names(module):
        setattr(module, name, getattr(own, name))
