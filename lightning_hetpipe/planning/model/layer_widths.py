"""Layers that a group of devices may divide by their channels: in how many units, and how long a part of them takes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lightning_hetpipe.planning.model.profile import Times


class Width(NamedTuple):
    """Seconds that a device takes for ``part`` of a layer's channels, more than 0 and at most 1."""

    part: float
    times: Times


@dataclass(frozen=True)
class LayerWidths:
    """Division of one layer.

    Attributes:
        run: The first layer of those whose devices hand their channels on to each other until this one, itself perhaps.
        units: By the name of each of its modules that is divided, as a plan's
            :class:`~lightning_hetpipe.planning.plan.planned_worker.PlannedSplit` has it: channels, groups of channels
            or heads. None of a layer that computes the channels that each device has, as an activation does.
        sums: Whether devices give what has to be added, as the second linear layer of a transformer's MLP does.
        measured: By a device's name, times of some parts, in ascending order, the last one that of all.
    """

    run: int
    units: Mapping[str, int] = field(default_factory=dict)
    sums: bool = False
    measured: Mapping[str, Sequence[Width]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "measured", {name: tuple(own) for name, own in self.measured.items()})

    def seconds(self, device: str | None, whole: float, units: int) -> list[float]:
        """Seconds of 0, 1, ... of ``units`` equal parts of a layer that takes ``whole`` seconds; none takes longer than
        more of them.

        What lies between two parts that were measured takes as long as the larger one, since kernels compute channels
        in blocks. Where ``device`` was not measured another one stands for it. Times are in the ratio of those of the
        whole layer; where nothing was measured, equal parts take equal times.

        Args:
            device: Name of the device in the profile.
            whole: Of forward and backward.
            units: Number of parts.
        """
        own = self.measured.get(device or "") or next(iter(self.measured.values()), ())
        known = [each.times.forward + each.times.backward for each in own]
        if not known or not known[-1]:
            return [whole * count / units for count in range(units + 1)]
        least = [*accumulate(reversed(known), min)][::-1]  # what disturbed a measurement has added to it
        places = [round(each.part * units, 6) for each in own]  # a float's last digits put no part behind its own
        at = [min(bisect_left(places, count), len(least) - 1) for count in range(1, units + 1)]
        return [0.0, *(least[place] / known[-1] * whole for place in at)]


def layers_of_runs(widths: Mapping[int, LayerWidths], layers: Iterable[int]) -> list[list[int]]:
    """The layers of each run among ``layers``, in order."""
    found: dict[int, list[int]] = {}
    for layer in sorted(layers):
        found.setdefault(widths[layer].run, []).append(layer)
    return [*found.values()]
