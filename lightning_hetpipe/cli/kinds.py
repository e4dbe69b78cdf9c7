"""Whether a value from the configuration is of the kind that an argument's annotation names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "null",
}


def hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the arguments of ``target``; none where they cannot be evaluated."""
    try:
        return get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # a name that is imported for type checkers only, say
        return {}


def expected(value: Any, hint: Any) -> str | None:
    """What ``hint`` wants, in words, where the plain ``value`` is something else; None where it fits.

    Only annotations that are made of bool, int, float, str, None and Literal are judged, and only plain values.
    """
    members = list(_members(hint))
    if not isinstance(value, tuple(_NAMES)) or not all(member in _NAMES or _is_literal(member) for member in members):
        return None
    if any(_fits(value, member) for member in members):
        return None
    if float in members:
        members = [member for member in members if member is not int]
    words = [
        word
        for member in members
        for word in (map(repr, get_args(member)) if _is_literal(member) else [_NAMES[member]])
    ]
    return " or ".join(words)


def _members(hint: Any) -> Iterator[Any]:
    if get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from _members(member)
    else:
        yield hint


def _is_literal(member: Any) -> bool:
    return get_origin(member) is Literal


def _fits(value: Any, member: Any) -> bool:
    if _is_literal(member):
        return value in get_args(member)
    if member is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if member is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, member)
