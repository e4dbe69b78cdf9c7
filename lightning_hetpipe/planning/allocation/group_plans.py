"""Plans of groups of devices. One plan serves all groups of the same kinds of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from lightning_hetpipe.planning.allocation.groupings import Group
from lightning_hetpipe.planning.model.cluster import Device, DeviceSlot, Link
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.problem import PlanningProblem

Kinds: TypeAlias = tuple[tuple[Link, tuple[Device, ...]], ...]
"""For each node of a group, the link between its devices and the devices, in an order that equal groups share."""


class GroupPlans:
    """Cache of plans for groups, all with the requirements of ``problem``."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        self._rates: dict[Kinds, float] = {}
        self._known: dict[tuple[Kinds, int | None, bool], tuple[Estimate, Group]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def kinds(self, group: Sequence[DeviceSlot]) -> Kinds:
        """Return the kinds of the devices of ``group``. Groups of equal kinds have equal plans."""
        return self._sorted(group)[0]

    def rate(self, group: Sequence[DeviceSlot]) -> float:
        """Return the minibatches per second of ``group`` by a brief search, or 0 if no plan fits."""
        kinds, slots = self._sorted(group)
        if kinds not in self._rates:
            found = best_plan(replace(self._problem, slots=slots, brief=True))
            self._rates[kinds] = found.rate if found.fits else 0.0
        return self._rates[kinds]

    def plan(self, group: Sequence[DeviceSlot], in_flight: int | None = None, *, fewer: bool = False) -> Estimate:
        """Return the plan of ``group``. Arguments and errors are as for
        :func:`~lightning_hetpipe.planning.search.choice.best_plan`."""
        kinds, slots = self._sorted(group)
        if (key := (kinds, in_flight, fewer)) not in self._known:
            choice = self._found(slots, in_flight, fewer)
            self._known[key] = choice, slots
            if choice.fits and fewer:
                self._known[kinds, choice.in_flight, False] = self._known[kinds, choice.in_flight, True] = choice, slots
        choice, others = self._known[key]
        mine = dict(zip(others, slots, strict=True))
        return replace(
            choice,
            stages=tuple(replace(stage, slot=mine[stage.slot]) for stage in choice.stages),
            idle=tuple(mine[slot] for slot in choice.idle),
        )

    def _found(self, slots: Group, in_flight: int | None, fewer: bool) -> Estimate:
        return best_plan(replace(self._problem, slots=slots), in_flight, fewer=fewer)

    def _sorted(self, group: Sequence[DeviceSlot]) -> tuple[Kinds, Group]:
        nodes: dict[int, list[DeviceSlot]] = {}
        for slot in sorted(group, key=lambda slot: (repr(slot.device), slot.number)):
            nodes.setdefault(slot.node, []).append(slot)
        kinds = {
            node: (self._problem.cluster.nodes[node].own_link, tuple(slot.device for slot in slots))
            for node, slots in nodes.items()
        }
        order = sorted(nodes, key=lambda node: (repr(kinds[node]), node))
        return tuple(kinds[node] for node in order), tuple(slot for node in order for slot in nodes[node])
