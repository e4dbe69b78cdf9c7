"""Marks of parametrised cases, and of tests that hypothesis finds cases for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")

FEW = False
"""Slow tests are left out; conftest.py says so before it collects any."""


def slow_except(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """``cases`` for ``pytest.mark.parametrize``: ``make test`` runs the ``fast`` ones, ``make test-all`` all.

    A tuple is one case of several arguments.
    """
    cases = list(cases)
    missing = [case for case in fast if case not in cases]
    assert not missing, f"{missing} are no cases"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in fast else pytest.mark.slow)
        for case in cases
    ]


def quick(*ids: str) -> pytest.MarkDecorator:
    """Has ``make test`` run only the cases with these ids of a parametrised test, and ``make test-all`` all.

    For grids whose arguments are parametrised one by one, so that no list holds the cases.
    """
    return pytest.mark.quick(*ids)


def fewer(everything: Sequence[T], some: Sequence[T]) -> Sequence[T]:
    """Values that one test goes through: ``some`` of them where slow tests are left out."""
    return some if FEW else everything


def explores(examples: int) -> settings:
    """Has hypothesis try so many cases, or a third of them where slow tests are left out, as in ``make test``.

    ``make test`` tries the same cases each time, ``make test-all`` others each time (conftest.py).
    """
    return settings(max_examples=max(1, examples // 3) if FEW else examples, deadline=None)
