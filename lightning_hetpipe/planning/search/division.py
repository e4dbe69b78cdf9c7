"""Division of the layers among devices: the kind of each stage's device, and the split points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_hetpipe.planning.model.costs import Costs, Floats

Fits: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class Room:
    """Room of the devices for stages, by their boundaries.

    Attributes:
        fits: For a kind of device, whether a stage has room on it; the same for the last stage.
        before: Bytes of all stages but the last one.
        last: Bytes of the last one.
    """

    fits: Callable[[int], tuple[Fits, Fits]]
    before: Floats
    last: Floats


@dataclass(frozen=True)
class Division:
    """Layers divided among devices.

    Attributes:
        kinds: The kind of each stage's device.
        splits: The first layer of each stage.
        takes: Seconds of each stage.
    """

    kinds: tuple[int, ...]
    splits: tuple[int, ...]
    takes: tuple[float, ...] = field(compare=False)

    @classmethod
    def of(cls, costs: Costs, kinds: Sequence[int], splits: Sequence[int]) -> Division:
        return cls(tuple(kinds), tuple(splits), tuple(costs.takes(kinds, splits)))

    @property
    def bottleneck(self) -> float:
        """T_max in seconds."""
        return max(self.takes)

    def period(self, in_flight: int, synchronise: float = 0.0) -> float:
        """Lower bound of the seconds for each minibatch; ``synchronise`` is what each wave's end waits."""
        return max(self.bottleneck, (sum(self.takes) + synchronise) / in_flight)
