"""The demo's sizes, checked where they are given."""

from __future__ import annotations

from lightning_hetpipe.errors import SettingError


def at_least_one(**sizes: int) -> None:
    """Raises a SettingError for the first of ``sizes`` that is below 1, by its name."""
    for name, size in sizes.items():
        if size < 1:
            raise SettingError(f"{name}={size} must be at least 1")
