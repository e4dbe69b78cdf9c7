"""Counts of a divided layer's units that the members of a group get: by shares, or as a plan says for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_hetpipe.errors import SettingError, nearest
from lightning_hetpipe.rules.channel_layouts import apportioned

LEAST_UNITS = 2
"""Fewer cannot be divided."""


@dataclass(frozen=True)
class ChannelCounts:
    """What a group was asked to divide.

    Attributes:
        shares: Of each member, for all layers that can be divided.
        splits: Counts by layer, in place of that; layers that are not there are left whole, or go on as they are given
            their input.
    """

    shares: Sequence[float]
    splits: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def of(self, layer: str, options: Sequence[int]) -> tuple[int, ...] | None:
        """Counts of ``layer``, which can be divided in so many units as one of ``options`` says, the best one first;
        None where it is to be left whole.

        Raises:
            SettingError: where counts were given that fit none of these.
        """
        if not self.splits:
            return apportioned(options[0], self.shares) if options[0] >= LEAST_UNITS else None
        if layer not in self.splits:
            return None
        counts = tuple(self.splits[layer])
        if sum(counts) not in options:
            can = " or ".join(f"{each} units" for each in dict.fromkeys(options))
            raise SettingError(
                f"the split of '{layer}' gives its members {sum(counts)} units ({', '.join(map(str, counts))}), and it"
                f" is divided in {can}; give counts that add up to that"
            )
        return counts

    def check(self, divided: Mapping[str, int]) -> None:
        """Refuse counts for what is no layer that can be ``divided``.

        Raises:
            SettingError: that names the first one.
        """
        for layer in self.splits:
            if layer not in divided:
                raise SettingError(
                    f"the split names '{layer}', which is no layer of its stage that can be divided"
                    f"{nearest(layer, divided) or '; those are ' + (', '.join(divided) or 'none')}"
                )
