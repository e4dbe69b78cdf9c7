"""Checks of the demo's sizes and rates."""

from __future__ import annotations

from lightning_hetpipe.errors import SettingError


def at_least_one(**sizes: int) -> None:
    """Raise a SettingError for the first of ``sizes`` that is below 1, by its name."""
    for name, size in sizes.items():
        if size < 1:
            raise SettingError(f"{name}={size} must be at least 1")


def within(low: float, high: float, **values: float) -> None:
    """Raise a SettingError for the first of ``values`` that is outside of ``low`` to ``high``, by its name."""
    for name, value in values.items():
        if not low <= value <= high:  # so NaN is outside, too
            end = "" if high == float("inf") else f" and at most {high:g}"
            raise SettingError(f"{name}={value} must be at least {low:g}{end}")
