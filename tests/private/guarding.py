"""A mark of tests that guard private names of torch and Lightning: each says what breaks when its name moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

GUARDED: set[str] = set()
Test = TypeVar("Test", bound=Callable[..., Any])


def guards(*names: str) -> Callable[[Test], Test]:
    """Marks the test of private ``names``."""
    GUARDED.update(names)
    return lambda test: test
