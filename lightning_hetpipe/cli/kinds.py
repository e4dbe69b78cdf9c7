"""Comparison of a value from the configuration with the annotation of an argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from lightning_hetpipe.cli.targets import locate

_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "null",
}
_IMPLIED = {float: int, str: Path}
"""Types that another one implies: a number may be whole, a path is text."""


def expected(value: Any, hint: Any, *, classes: bool = False) -> str | None:
    """Describe what ``hint`` wants where ``value`` is something else; None where it fits, or nobody can tell.

    Args:
        value: Plain: a section is a mapping with a `_target_`.
        hint: The annotation. Those that are made of bool, int, float, str, None and Literal are judged.
        classes: Judge annotations that name classes and containers, too.
    """
    members = _members(hint)
    if not all(_is_plain(member) or (classes and _is_class(member)) for member in members):
        return None
    if is_section(value) and not classes:
        return None
    try:
        fits = any(_fits(value, member) for member in members)
    except TypeError:  # a protocol that cannot be asked
        return None
    return None if fits else _words(members)


def is_section(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def _members(hint: Any) -> list[Any]:
    if get_origin(hint) in (Union, UnionType):
        return [member for each in get_args(hint) for member in _members(each)]
    return [hint]


def _is_plain(member: Any) -> bool:
    return member in _NAMES or get_origin(member) is Literal


def _is_class(member: Any) -> bool:
    """A class, or a container such as list[int]; not a type variable or a signature."""
    kind = get_origin(member) or member
    if not inspect.isclass(kind) or kind in (Any, object, type, Callable):
        return False
    return kind is member or issubclass(kind, Iterable)


def _fits(value: Any, member: Any) -> bool:
    kind = get_origin(member) or member
    if kind is Literal:
        return value in get_args(member)
    if is_section(value):
        made = None if value.get("_partial_") else locate(str(value["_target_"]))
        return not inspect.isclass(made) or issubclass(made, (int, float) if kind is float else kind)
    if isinstance(value, dict):
        return issubclass(kind, Mapping)
    if isinstance(value, list):  # YAML has no tuples
        return issubclass(kind, Iterable) and not issubclass(kind, str | Mapping) and _items_fit(value, member)
    if isinstance(value, bool) and kind in (int, float):
        return False
    is_generic = kind is not member  # Iterable[str] does not mean a text's letters
    return isinstance(value, (int, float) if kind is float else kind) and not (is_generic and isinstance(value, str))


def _items_fit(values: list[Any], member: Any) -> bool:
    """Return whether a list's items are what `list[int]`, `tuple[float, float]` or a bare `list` says."""
    hints = [hint for hint in get_args(member) if hint is not ...]
    if len(hints) > 1 and len(hints) != len(values):
        return False
    pairs = zip(values, hints * len(values) if len(hints) == 1 else hints, strict=False)
    return all(expected(value, hint, classes=True) is None for value, hint in pairs)


def _words(members: list[Any]) -> str:
    implied = [_IMPLIED.get(member) for member in members]
    return " or ".join(dict.fromkeys(word for each in members if each not in implied for word in _word(each)))


def _word(member: Any) -> list[str]:
    kind = get_origin(member) or member
    if kind is Literal:
        return [repr(value) for value in get_args(member)]
    if member in _NAMES:
        return [_NAMES[member]]
    if not inspect.isclass(kind):
        return ["anything"]
    if issubclass(kind, Mapping):
        return ["a mapping"]
    if not get_args(member):
        return [f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"]
    items = [_words(_members(hint)) for hint in get_args(member) if hint is not ...]
    return [f"[{', '.join(items)}{', ...' if len(items) == 1 else ''}]"]
