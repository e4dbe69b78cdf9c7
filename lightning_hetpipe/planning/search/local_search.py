"""Changes of a division: a split point moves, two devices change places, another is taken, one is left out or added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from lightning_hetpipe.planning.search.division import Division
from lightning_hetpipe.planning.search.problem import PlanningProblem

Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The kind of each stage's device, and its first layer."""


def changes(problem: PlanningProblem, division: Division) -> Iterator[Division]:
    """Yield the divisions that differ from ``division`` by one change."""
    costs = problem.costs
    kinds, splits = division.kinds, division.splits
    ends = (*splits[1:], costs.layers)
    places = [*_moved(splits, ends, kinds), *_placed(problem, kinds, splits, ends)]
    for other, starts in places:
        if problem.stages in (None, len(other)) and (not problem.ordered or _is_rising(other)):
            yield Division.of(costs, other, starts)


def _moved(splits: Sequence[int], ends: Sequence[int], kinds: tuple[int, ...]) -> Iterator[Place]:
    """Move one split point, by 1, 2, 4, ... layers."""
    step = 1
    while step <= max(1, ends[-1] // 2):
        for index in range(1, len(splits)):
            for split in (splits[index] - step, splits[index] + step):
                if splits[index - 1] < split < ends[index]:
                    yield kinds, (*splits[:index], split, *splits[index + 1 :])
        step *= 2


def _placed(
    problem: PlanningProblem, kinds: tuple[int, ...], splits: tuple[int, ...], ends: tuple[int, ...]
) -> Iterator[Place]:
    """Change devices, whatever their order."""
    idle = [kind for kind, each in enumerate(problem.costs.kinds) if kinds.count(kind) < len(each.slots)]
    for index, kind in enumerate(kinds):
        before, after = kinds[:index], kinds[index + 1 :]
        if after:
            yield (*before, *after), (*splits[: index + 1], *splits[index + 2 :])
        if before:
            yield (*before, *after), (*splits[:index], *splits[index + 1 :])
        for other in idle:
            if other != kind:
                yield (*before, other, *after), splits
            if ends[index] - splits[index] > 1:
                split = (*splits[: index + 1], (splits[index] + ends[index]) // 2, *splits[index + 1 :])
                yield (*before, other, kind, *after), split
                yield (*before, kind, other, *after), split
        for second in range(index):
            if kinds[second] != kind:
                yield (*kinds[:second], kind, *kinds[second + 1 : index], kinds[second], *after), splits


def _is_rising(kinds: Sequence[int]) -> bool:
    return all(one < other for one, other in pairwise(kinds))
