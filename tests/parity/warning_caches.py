"""Warnings that Lightning gives once in a process."""

from __future__ import annotations

import functools
import sys

from lightning.pytorch.utilities.rank_zero import WarningCache


def forget_warnings() -> None:
    """Lets Lightning give each warning of a kind that it gives once in a process again."""
    for cache in _caches(sum(name.startswith("lightning.") for name in sys.modules)):
        cache.clear()


@functools.cache
def _caches(modules: int) -> list[WarningCache]:
    """Caches that Lightning's modules and their classes hold; so many of these are imported."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning."):
            for value in list(vars(module).values()):
                held = [value, *vars(value).values()] if isinstance(value, type) else [value]
                found += [each for each in held if isinstance(each, WarningCache)]
    return found
