"""Marks of parametrised cases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


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
