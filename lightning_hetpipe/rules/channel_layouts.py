"""Counts of units that the members of a group get, and layouts of tensors that they hold in parts: pure arithmetic.

A tensor is divided along one dimension. That dimension is seen as ``outer`` times ``units`` times ``inner``: in each of
``outer`` blocks the units lie one after the other, each of ``inner`` entries. A member has ``counts[member]`` units of
every block, behind those of the members before it. So 3 blocks are a fused projection to queries, keys and values; its
units are heads, and ``inner`` their width. Channels that were flattened with their pixels have as many entries as each
has pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from lightning_hetpipe.errors import SettingError, nearest

Size = int | str
"""Size of a dimension; text, such as "2*s77", where it may vary from call to call."""

Sizes = Sequence[Size]

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


@dataclass(frozen=True)
class ChannelLayout:
    """Division of a tensor among the members of a group.

    Attributes:
        dim: Which dimension is divided, from 0.
        outer: Blocks that are each divided alike; None where their number may vary from call to call.
        inner: Entries of each unit.
        counts: The units of each member.
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
        """The members that have something."""
        return [member for member, count in enumerate(self.counts) if count]

    @property
    def ends(self) -> list[int]:
        """The entry, of each block, at which each member's part ends."""
        return [end * self.inner for end in accumulate(self.counts)]

    def size(self, member: int) -> int | None:
        """Size of the divided dimension for ``member``; None where that may vary."""
        return None if self.outer is None else self.outer * self.counts[member] * self.inner

    def at(self, dim: int) -> ChannelLayout:
        """The same division of dimension ``dim``."""
        return replace(self, dim=dim)

    def reshaped(self, before: Sizes, after: Sizes) -> ChannelLayout | None:
        """Division of a tensor of sizes ``after`` that is a view of one of sizes ``before`` with this division.

        Returns:
            None if the members' parts are no such view of theirs.
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
    """Product of ``sizes``; None where one of them may vary."""
    known = [size for size in sizes if isinstance(size, int)]
    return math.prod(known) if len(known) == len(sizes) else None


def apportioned(units: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Divide ``units`` in proportion to ``shares``: whole numbers, what remains goes to the largest remainders."""
    total = sum(shares)
    exact = [units * share / total for share in shares]
    counts = [int(each) for each in exact]
    largest = sorted(range(len(shares)), key=lambda member: (counts[member] - exact[member], member))
    for member in largest[: units - sum(counts)]:
        counts[member] += 1
    return tuple(counts)
