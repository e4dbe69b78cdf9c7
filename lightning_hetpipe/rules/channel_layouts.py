"""Counts of units for the members of a group, and layouts of tensors that members hold in parts, as pure arithmetic.

A tensor is divided along one dimension, which is seen as ``outer`` times ``units`` times ``inner``. Each of ``outer``
blocks has the units one after the other, and each unit has ``inner`` entries. A member has ``counts[member]`` units of
every block, behind the units of the members before it. For example, a fused projection to queries, keys and values has
3 blocks. Its units are heads, and ``inner`` is their width. For channels flattened with their pixels, ``inner`` is the
number of pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from lightning_hetpipe.errors import SettingError, nearest

Size = int | str
"""Size of a dimension, or text such as "2*s77" if the size may vary from call to call."""

Sizes = Sequence[Size]

LEAST_UNITS = 2
"""Smallest number of units that can be divided."""

_LIMIT = 1e300
"""Upper bound of shares, so that their sum is finite."""


def is_share(number: float) -> bool:
    """Return True if ``number`` may be the share of a member: 0 or more, with a finite sum of shares."""
    return 0 <= number < _LIMIT


@dataclass(frozen=True)
class ChannelCounts:
    """Division that a group was asked for.

    ``shares`` has the share of each member, for all layers that can be divided. Counts in ``splits`` replace the
    shares: other layers are then left whole, or follow the division of their input.
    """

    shares: Sequence[float]
    splits: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def of(self, layer: str, options: Sequence[int]) -> tuple[int, ...] | None:
        """Return the counts of ``layer``, or None if it stays whole. ``options`` are numbers of units, best first."""
        if not self.splits:
            return apportioned(options[0], self.shares) if options[0] >= LEAST_UNITS else None
        counts = self.splits.get(layer, ())
        return counts if sum(counts) in options else None

    def check(self, divisible: Mapping[str, Sequence[int]]) -> None:
        """Refuse counts for layers that are not ``divisible``, or that add up to none of a layer's numbers of units.

        Raises:
            SettingError: for the first such layer.
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


@dataclass(frozen=True)
class ChannelLayout:
    """Division of a tensor among the members of a group.

    Attributes:
        dim: Dimension that is divided, from 0.
        outer: Number of blocks, each divided alike. None if it may vary from call to call.
        inner: Entries of each unit.
        counts: Units of each member.
    """

    dim: int
    outer: int | None
    inner: int
    counts: tuple[int, ...]

    @property
    def units(self) -> int:
        """Units of each block, of all members together."""
        return sum(self.counts)

    @property
    def members(self) -> list[int]:
        """The members that have at least one unit."""
        return [member for member, count in enumerate(self.counts) if count]

    @property
    def ends(self) -> list[int]:
        """The entry, in each block, at which each member's part ends."""
        return [end * self.inner for end in accumulate(self.counts)]

    def size(self, member: int) -> int | None:
        """Return the size of the divided dimension for ``member``, or None if it may vary."""
        return None if self.outer is None else self.outer * self.counts[member] * self.inner

    def at(self, dim: int) -> ChannelLayout:
        """Return the same division of dimension ``dim``."""
        return replace(self, dim=dim)

    def reshaped(self, before: Sizes, after: Sizes) -> ChannelLayout | None:
        """Return the division of a view with sizes ``after`` of a tensor with sizes ``before`` and this division.

        None if the members' parts of the view are not views of their parts of the tensor.
        """
        left = 0
        while left < min(len(before), len(after)) and before[left] == after[left]:
            left += 1
        if self.dim < left:
            return self
        right = 0
        while right < min(len(before), len(after)) - left and before[-1 - right] == after[-1 - right]:
            right += 1
        if self.dim >= len(before) - right:
            return self.at(self.dim + len(after) - len(before))
        behind = _volume(before[self.dim + 1 : len(before) - right])
        if behind is None:
            return None
        inner, step = self.inner * behind, 1
        for dim in range(len(after) - right - 1, left - 1, -1):
            size = after[dim]
            if inner % step:
                return None
            if isinstance(size, int):
                if size * step >= self.units * inner:
                    entries = self.units * inner // step
                    return None if size % entries else ChannelLayout(dim, size // entries, inner // step, self.counts)
                step *= size
            else:
                return ChannelLayout(dim, None, inner // step, self.counts) if dim == left else None
        return None


def _volume(sizes: Sizes) -> int | None:
    known = [size for size in sizes if isinstance(size, int)]
    return math.prod(known) if len(known) == len(sizes) else None


def apportioned(units: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Divide ``units`` in proportion to ``shares`` into whole numbers. The largest remainders are rounded up."""
    total = sum(shares)
    exact = [units * share / total for share in shares]
    counts = [int(each) for each in exact]
    largest = sorted(range(len(shares)), key=lambda member: (counts[member] - exact[member], member))
    for member in largest[: units - sum(counts)]:
        counts[member] += 1
    return tuple(counts)
