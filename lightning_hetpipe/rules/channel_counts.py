"""Counts of a divided layer's units that the members of a group get: by shares, or as a plan says for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_hetpipe.errors import SettingError, nearest
from lightning_hetpipe.rules.channel_layouts import apportioned

LEAST_UNITS = 2
"""Fewer cannot be divided."""

_LIMIT = 1e300
"""Shares are below this, so that their sum is finite."""


def is_share(number: float) -> bool:
    """Return True for a ``number`` that may be the share of a member: 0 or more, and finite with those of others."""
    return 0 <= number < _LIMIT


@dataclass(frozen=True)
class ChannelCounts:
    """Division that a group was asked for.

    Attributes:
        shares: Of each member, for all layers that can be divided.
        splits: Counts by layer, in place of that; layers that are not there are left whole, or go on as they are given
            their input.
    """

    shares: Sequence[float]
    splits: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def of(self, layer: str, options: Sequence[int]) -> tuple[int, ...] | None:
        """Counts of ``layer``, which can be divided in so many units as one of ``options`` says, the best one first;
        None where it is to be left whole."""
        if not self.splits:
            return apportioned(options[0], self.shares) if options[0] >= LEAST_UNITS else None
        counts = self.splits.get(layer, ())
        return counts if sum(counts) in options else None

    def check(self, divisible: Mapping[str, Sequence[int]]) -> None:
        """Refuse counts for what is none of the ``divisible`` layers, and counts that fit none of its numbers of units.

        Raises:
            SettingError: that names the first one.
        """
        for layer, counts in self.splits.items():
            if layer not in divisible:
                raise SettingError(
                    f"the plan's splits name '{layer}', which is no layer of its stage that can be divided"
                    f"{nearest(layer, divisible) or '; those are ' + (', '.join(divisible) or 'none')}"
                )
            if sum(counts) not in divisible[layer]:
                raise SettingError(
                    f"the plan's split of '{layer}' gives its members {sum(counts)} units"
                    f" ({', '.join(map(str, counts))}), and it is divided in"
                    f" {' or '.join(map(str, divisible[layer]))}; give counts that add up to that"
                )
