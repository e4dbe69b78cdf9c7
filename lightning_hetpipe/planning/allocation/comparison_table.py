"""Allocations of one cluster side by side: NP, HD, ED, ED local, placed layers, and the best that is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.allocation.allocator import Allocation, Allocator
from lightning_hetpipe.planning.allocation.grouping_search import best_allocation
from lightning_hetpipe.planning.allocation.groupings import GROUPINGS, PLACED
from lightning_hetpipe.planning.allocation.placed import placed
from lightning_hetpipe.planning.model.units import digits, in_bytes
from lightning_hetpipe.planning.plan.table import aligned
from lightning_hetpipe.rules.parameter_placement import CANDIDATES

SIDE_BY_SIDE = (("np", "size"), ("hd", "size"), ("ed", "size"), ("ed", "local"))
"""The paper's allocations: grouping and placement of parameters."""

_HEADER = [
    "allocation",
    "placement",
    "shares",
    "N",
    "Nm",
    "s_global",
    "network per minibatch",
    "minibatches per second",
]


@dataclass(frozen=True)
class Compared:
    """An allocation to compare with others.

    Attributes:
        name: Such as "ed".
        placement: Of parameters.
        shares: Whether faster virtual workers have longer waves.
        found: The allocation; None where it is refused.
        refusal: The reason then.
    """

    name: str
    placement: str
    shares: bool
    found: Allocation | None
    refusal: str = ""

    @property
    def title(self) -> str:
        """Name for people, such as "ED local"; the placement by size goes without saying."""
        name = self.name if self.name in ("auto", PLACED) else self.name.upper()
        return name if self.placement == "size" or self.name == PLACED else f"{name} {self.placement}"


def compared(
    allocator: Allocator, shares: Sequence[bool] = (False, True), told: Callable[[str], None] = lambda line: None
) -> Iterator[Compared]:
    """Make the allocations; for each of ``shares`` the last is the best that is found, of any placement."""
    for each in shares:
        for name, placement in SIDE_BY_SIDE:
            try:
                grouping = GROUPINGS[name](allocator.cluster, allocator.speed)
            except SettingError as error:
                yield Compared(name, placement, each, None, str(error))
                continue
            yield Compared(name, placement, each, allocator.allocate(name, grouping, shares=each, placement=placement))
        try:
            yield Compared(PLACED, "local", each, placed(allocator, shares=each))
        except SettingError as error:
            yield Compared(PLACED, "local", each, None, str(error))
        best = best_allocation(allocator, shares=each, placements=CANDIDATES, told=told)
        yield Compared("auto", best.placement, each, best)


def comparison(those: Sequence[Compared]) -> str:
    """A table of ``those``, and below it a line for each refusal."""
    rows = [_HEADER]
    for each in those:
        start = [each.name, each.placement, "auto" if each.shares else "equal"]
        found = each.found
        if found is None:
            rows.append([*start, "–", "–", "–", "–", "not possible"])
        elif not found.fits:
            rows.append([*start, str(len(found.grouping)), "–", "–", "–", "does not fit"])
        else:
            figures = [len(found.grouping), found.in_flight, found.staleness]
            rate, moved = digits(found.rate), in_bytes(round(found.network_bytes))
            rows.append([*start, *map(str, figures), moved, rate])
    refusals = dict.fromkeys(f"- {each.refusal}" for each in those if each.refusal)
    return "\n".join([*aligned(rows, left=(0, 1, 2)), *refusals])
