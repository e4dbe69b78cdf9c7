"""Checks of single arguments: each gives the value as it is used, or refuses it in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

from lightning_hetpipe.errors import SettingError

T = TypeVar("T")


def whole(name: str, value: Any, least: int = 1, other: str = "") -> int:
    """A whole number of at least ``least``; the message names ``other`` values that its caller takes."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(f"{name}={value!r} must be a whole number of at least {least}{other}")
    return value


def switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SettingError(f"{name}={value!r} must be True or False")
    return value


def seconds(name: str, value: Any, most: float = math.inf) -> float:
    """A time in seconds; ``most`` is a year or infinite."""
    found = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise SettingError(f"{name}={value!r} must be a datetime.timedelta, or a number of seconds")
    if not 0 < found <= most:
        limit = "" if most == math.inf else ", and at most a year"
        raise SettingError(f"{name}={value!r} must be positive{limit}")
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
