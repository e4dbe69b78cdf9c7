"""Marks of parametrised cases, and of tests that hypothesis finds cases for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

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


def explores(examples: int) -> settings:
    """Has hypothesis try so many cases, or a third of them where slow tests are left out, as in ``make test``."""
    return settings(max_examples=max(1, examples // 3) if FEW else examples, deadline=None)
