"""Layers that a group of devices may divide by their channels: in how many units, and how long so many of them take."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from lightning_hetpipe.planning.model.profile import Times

Role = Literal["divides", "follows", "sums"]
"""Effect of a layer on a division of channels: "divides" computes channels of its output from its whole input;
"follows" computes the channels that each device has, as an activation does; "sums" takes its input divided, and gives
what has to be added, as the second linear layer of a transformer's MLP does."""

ROLES: tuple[Role, ...] = ("divides", "follows", "sums")


class Width(NamedTuple):
    """Seconds that ``units`` of a layer's channels take, which is none of them or more."""

    units: int
    times: Times


@dataclass(frozen=True)
class LayerWidths:
    """Division of one layer.

    Attributes:
        role: What it does with divided channels.
        names: The modules of it that are divided, as a plan's
            :class:`~lightning_hetpipe.planning.plan.device_group.PlannedSplit` names them; none where it follows.
        units: Channels, groups of channels or heads that can be divided, of a layer that divides.
        measured: Of a device's name, times of some numbers of units, in ascending order, without all of them.
    """

    role: Role
    names: Sequence[str] = ()
    units: int = 0
    measured: Mapping[str, Sequence[Width]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "measured", {name: tuple(own) for name, own in self.measured.items()})

    def seconds(self, device: str | None, whole: float, units: int) -> list[float]:
        """Seconds of 0, 1, ... ``units`` units, of a layer that takes ``whole`` seconds for all of them; none takes
        longer than more of them.

        What lies between two numbers that were measured lies on a line between them; below the least it is that many
        times its part. Where ``device`` was not measured, another one stands for it, in the ratio of the whole layer's
        times; where none was, each unit takes an equal part.

        Args:
            device: Name of the device in the profile.
            whole: Of forward and backward.
            units: All.
        """
        own = self.measured.get(device or "") or next(iter(self.measured.values()), ())
        known = [(each.units * units / (self.units or units), each.times.forward + each.times.backward) for each in own]
        if known and not self.measured.get(device or "") and (widest := known[-1][1]) > 0:
            # Only the shape of another device's curve is taken.
            known = [(at, seconds / widest * whole * known[-1][0] / units) for at, seconds in known]
        points = [(0.0, 0.0), *(each for each in known if 0 < each[0] < units), (float(units), whole)]
        places = [at for at, _ in points]
        found = [0.0]
        for count in range(1, units + 1):
            right = bisect_left(places, count)
            (low, before), (high, after) = points[right - 1], points[right]
            found.append(before + (after - before) * (count - low) / (high - low))
        return [*accumulate(found, max)]
