"""The live layers of one stage, as Lightning's thread has them: versions are made of them, outsiders look at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress

from torch import nn

from lightning_hetpipe.pipeline.buffers import may_change, places, tensor_at
from lightning_hetpipe.pipeline.stage_messages import Flags, Move, StageState, Version
from lightning_hetpipe.rules.versions import Reading

Moves = Mapping[nn.Parameter, Move]
"""Expected changes of parameters by an optimizer step."""

NO_MOVES: Moves = {}


class Live:
    """Those of one stage, or parameters that no stage holds.

    Args:
        segments: The layers of each segment.
    """

    def __init__(self, segments: Sequence[Sequence[nn.Module]]) -> None:
        layers = nn.ModuleList([layer for segment in segments for layer in segment])
        self.parameters: list[nn.Parameter] = list(layers.parameters())
        self._modules = list(layers.modules())
        self._buffers = [places(segment) for segment in segments]
        self.shows = any(self._buffers)
        """True if forwards leave anything in the live layers."""

    def version(self, number: int, needed: Sequence[Reading], moves: Moves = NO_MOVES) -> Version:
        """Message that publishes the present weights and flags as version ``number``.

        Args:
            number: v.
            needed: Weights that minibatches use from now on.
            moves: Expected changes of parameters by an optimizer step, where weights are predicted.
        """
        buffers = [[*map(tensor_at, own)] for own in self._buffers]
        own = [moves.get(parameter) for parameter in self.parameters] if moves else ()
        return Version(number, self.parameters, self.flags(), buffers, needed, own)

    def flags(self) -> Flags:
        return Flags(
            tuple([parameter.requires_grad for parameter in self.parameters]),
            tuple([module.training for module in self._modules]),
        )

    def show(self, state: StageState, shown: Sequence[bool] | None = None) -> None:
        """Give buffers the values that a forward has left: all buffers, or the buffers that are to be ``shown``."""
        buffers = compress(zip(self._buffers, state.buffers, strict=True), shown or [True] * len(self._buffers))
        for own, left in buffers:
            for place, tensor in zip(own, left, strict=True):
                if not may_change(*place):
                    continue
                live = tensor_at(place)
                if live.shape == tensor.shape and live.dtype == tensor.dtype:
                    live.copy_(tensor)
                else:
                    setattr(*place, tensor.to(live.device, copy=True))
