"""Checks of single arguments: each gives the value as it is used, or refuses it in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

from lightning_hetpipe.errors import SettingError

T = TypeVar("T")

LONGEST = 365 * 24 * 3600.0
"""Largest time of a setting in seconds; threads cannot wait for much longer."""

MOST = 10**9
"""Largest number of a setting that counts waves or minibatches; messages carry it in 64 bits."""


def whole(name: str, value: Any, least: int = 1, other: str = "", most: int = MOST) -> int:
    """A whole number from ``least`` to ``most``; the message names ``other`` values that its caller takes."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(f"{name}={value!r} must be a whole number of at least {least}{other}")
    if value > most:
        raise SettingError(f"{name}={value!r} is more than {most}, the most that is possible; set fewer")
    return value


def switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SettingError(f"{name}={value!r} must be True or False")
    return value


def seconds(name: str, value: Any) -> float:
    """A time in seconds, of at most a year."""
    found = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise SettingError(f"{name}={value!r} must be a datetime.timedelta, or a number of seconds")
    if not 0 < found <= LONGEST:
        raise SettingError(f"{name}={value!r} must be positive, and at most a year")
    return float(found)


def one_of(name: str, value: T, known: Sequence[T]) -> T:
    if value not in known:
        raise SettingError(f"{name}={value!r} is not known; use {', '.join(map(repr, known[:-1]))} or {known[-1]!r}")
    return value


def optional(name: str, value: Any, kind: type[T], shown: str) -> T | None:
    """None, or an instance of ``kind``, which is ``shown`` to users by this name."""
    if value is not None and not isinstance(value, kind):
        raise SettingError(f"{name}={value!r} must be a {shown}, or None")
    return value
