"""Plans of all virtual workers of a cluster: one allocation, or all allocations side by side."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.planning.allocation.allocator import Allocation, Allocator
from lightning_hetpipe.planning.allocation.grouping_search import best_allocation
from lightning_hetpipe.planning.allocation.groupings import GROUPINGS, PLACED
from lightning_hetpipe.planning.allocation.placed import placed
from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot
from lightning_hetpipe.planning.model.units import digits, in_bytes
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.table import aligned
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.reporting.plots import draw_cluster
from lightning_hetpipe.rules.versions import WeightPolicy
from lightning_hetpipe.rules.waves import CANDIDATES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_NAMED = 4
"""Largest number of unused devices of a node and type that a remark lists by name."""

WORTH = 0.8
"""Fraction of the throughput without synchronisation, below which a remark says how to get more."""

COMPARE = "compare"
"""Value of the argument ``allocation`` for all allocations side by side."""

SIDE_BY_SIDE = (("np", "size"), ("hd", "size"), ("ed", "size"), ("ed", "local"), (PLACED, "local"))
"""Grouping and parameter placement of each compared allocation: the paper's allocations, and placed layers."""

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
    """Allocation ``name`` in a comparison. With ``shares``, faster virtual workers have longer waves.

    ``found`` is None if the allocation is refused. In this case ``refusal`` has the reason.
    """

    name: str
    placement: str
    shares: bool
    found: Allocation | None
    refusal: str = ""

    @property
    def title(self) -> str:
        """Name to show, such as "ED local". The usual placement is left out."""
        if self.name in ("auto", PLACED):  # with whatever placement they have
            return self.name
        return self.name.upper() if self.placement == "size" else f"{self.name.upper()} {self.placement}"


def compared(allocator: Allocator, shares: Sequence[bool]) -> Iterator[Compared]:
    """Yield allocations. For each of ``shares``, the last allocation is the best that is found, with any placement."""
    for each in shares:
        for name, placement in SIDE_BY_SIDE:
            try:
                yield Compared(name, placement, each, _allocated(allocator, name, each, placement))
            except SettingError as error:
                yield Compared(name, placement, each, None, str(error))
        best = best_allocation(allocator, shares=each, placements=CANDIDATES, told=_told)
        yield Compared("auto", best.placement, each, best)


def comparison(those: Sequence[Compared]) -> str:
    """Return a table of ``those``, and below it a line for each refusal."""
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


def drawn(cluster: Cluster, those: Sequence[Compared], plan: Plan) -> Figure:
    """Draw ``plan``, and beside it the rates of compared allocations. Raise SettingError without matplotlib."""
    bars: dict[str, list[float | None]] = {}
    for each in those:
        rates = bars.setdefault(each.title, [])
        rates.append(each.found.rate if each.found is not None and each.found.fits else None)
    return draw_cluster(plan, cluster, bars)


def cluster_plans(
    allocation: str, wsp: WSPSettings, problem: PlanningProblem, in_flight: int | None, policies: Sequence[WeightPolicy]
) -> tuple[Allocation, list[Compared]]:
    """Plan all virtual workers under the first of the weight ``policies`` with which they fit, or else under the last.

    Return the chosen allocation, and all compared allocations, if allocations are compared.

    Args:
        allocation: One of ``ALLOCATIONS``, or :data:`COMPARE`.
        problem: Requirements of one virtual worker's plan.
        in_flight: Nm, or None to choose it.

    Raises:
        SettingError: if the allocation is impossible on the cluster.
    """
    from lightning_hetpipe.workers.weight_copies import copies_kept  # with torch

    for weights in policies:
        allocator = Allocator(
            replace(problem, optimizer=problem.memory.state + copies_kept(wsp.update_dtype), weights=weights),
            in_flight=in_flight,
            clock_distance=wsp.clock_distance,
            wave=None if wsp.wave == "auto" else wsp.wave,
        )
        chosen, others = _planned(allocation, wsp, allocator)
        if chosen.fits:
            break
    return chosen, others


def _planned(allocation: str, wsp: WSPSettings, allocator: Allocator) -> tuple[Allocation, list[Compared]]:
    shares = "shares" in wsp.left_out or wsp.shares != "equal"
    asked = None if "placement" in wsp.left_out else wsp.placement
    if allocation == COMPARE:
        others = [*compared(allocator, (False, True) if "shares" in wsp.left_out else (shares,))]
        chosen = others[-1].found
        assert chosen is not None, "the search refuses nothing"
        return chosen, others
    if allocation == "auto":
        placements = CANDIDATES if asked is None else (asked,)
        return best_allocation(allocator, shares=shares, placements=placements, told=_told), []
    return _allocated(allocator, allocation, shares, asked), []


def _allocated(allocator: Allocator, name: str, shares: bool, placement: str | None) -> Allocation:
    if name == PLACED:
        found = placed(allocator, shares=shares, placement=placement or "local")
        assert found is not None, "there is no floor"
        return found
    grouping = GROUPINGS[name](allocator.cluster, allocator.speed)
    return allocator.allocate(name, grouping, shares=shares, placement=placement or "size")


def _told(line: str) -> None:
    """Show the search's progress, if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}\r", end="", file=sys.stderr, flush=True)


def remarks(found: Allocation, others: Sequence[Compared], cluster: Cluster) -> list[str]:
    """Return lines below the table: other allocations, slowest stages, undeclared links, unused devices."""
    lines = ["", comparison(others), ""] if others else [""]
    reasons: dict[str, list[int]] = {}
    for number, choice in enumerate(found.choices):
        reasons.setdefault(choice.reasons[0], []).append(number)
    for reason, workers in reasons.items():
        lines.append(f"- virtual worker {', '.join(map(str, workers))}: {reason}")
    lines += [f"- {link}" for link in cluster.assumed(cluster.slots)]
    used = {stage.slot for choice in found.choices for stage in choice.stages}
    if found.fits:
        idle = [slot for slot in cluster.slots if slot not in used]
        lines += unused(idle, cluster, "no plan with it is faster")
        if (faster := _with_longer_waves(found)) is not None:
            lines.append(faster)
    return lines


def unused(slots: Sequence[DeviceSlot], cluster: Cluster, why: str) -> list[str]:
    """Return a line for each node and type of device in ``slots``, which says that these devices are not used."""
    alike: dict[tuple[int, str], list[str]] = {}
    for slot in slots:
        alike.setdefault((slot.node, slot.device.name), []).append(str(slot))
    lines = []
    for (node, name), own in alike.items():
        place = f"{cluster.nodes[node].name} " if len(cluster.nodes) > 1 else ""
        if len(own) > MOST_NAMED:
            lines.append(f"- {place}{len(own)} devices {name}, {own[0]} and others, are not used: {why}")
        else:
            lines.append(f"- {place}{', '.join(own)} {'is' if len(own) == 1 else 'are'} not used: {why}")
    return lines


def _with_longer_waves(found: Allocation) -> str | None:
    """Return a remark on longer waves, if synchronisation takes much of the time."""
    if len(found.choices) == 1 or found.rate >= WORTH * found.alone:
        return None
    return (
        f"- without synchronisation it would be {digits(found.alone)} minibatches per second: a longer"
        f" strategy.wsp.wave, such as {4 * min(found.lengths)}, synchronises less often, and makes weights staler"
    )
