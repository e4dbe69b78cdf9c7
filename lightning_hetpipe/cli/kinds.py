"""Whether a value from the configuration is of the kind that an argument's annotation names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "null",
}
_IMPLIED = {float: int, str: Path}
"""What need not be said as well: a number may be whole, a path is text."""


@dataclass(frozen=True, repr=False)
class Built:
    """What a section with a `_target_` stands for.

    Attributes:
        kind: its class; None where nobody can tell before it is built, as with a function.
    """

    kind: type | None

    def __repr__(self) -> str:
        return "?" if self.kind is None else self.kind.__qualname__


def hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the arguments of ``target``; none where they cannot be evaluated."""
    try:
        return get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # a name that is imported for type checkers only, say
        return {}


def expected(value: Any, hint: Any, *, classes: bool = False) -> str | None:
    """What ``hint`` wants, in words, where ``value`` is something else; None where it fits.

    Args:
        value: a plain value, a list or dict of such, or a `Built`.
        hint: the annotation. Those that are made of bool, int, float, str, None and Literal are judged.
        classes: judge annotations that name classes and containers, too. Only for code whose annotations are known to
            hold: many take a string for a path, or anything that quacks.
    """
    members = list(_members(hint))
    if not isinstance(value, (*_NAMES, list, dict, Built)) or (isinstance(value, Built) and not classes):
        return None
    if not all(_is_plain(member) or (classes and _is_class(member)) for member in members):
        return None
    try:
        fits = any(_fits(value, member) for member in members)
    except TypeError:  # a protocol that cannot be asked
        return None
    return None if fits else _words(members)


def _members(hint: Any) -> Iterator[Any]:
    if get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from _members(member)
    else:
        yield hint


def _is_plain(member: Any) -> bool:
    return member in _NAMES or get_origin(member) is Literal


def _is_class(member: Any) -> bool:
    """A class, or a container such as list[int]; not a type variable or a signature."""
    kind = get_origin(member) or member
    if not inspect.isclass(kind) or kind in (Any, object, type, Callable):
        return False
    return kind is member or issubclass(kind, Iterable)


def _fits(value: Any, member: Any) -> bool:
    if get_origin(member) is Literal:
        return value in get_args(member)
    kind = get_origin(member) or member
    if isinstance(value, Built):
        return value.kind is None or issubclass(value.kind, (int, float) if kind is float else kind)
    if isinstance(value, list):
        return _is_sequence(kind) and _items_fit(value, member)
    if isinstance(value, dict):
        return issubclass(kind, Mapping)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is member or not isinstance(value, str))


def _is_sequence(kind: type) -> bool:
    """Whether a list may stand for it; YAML has no tuples."""
    return issubclass(kind, Iterable) and not issubclass(kind, str | Mapping)


def _items_fit(values: list[Any], member: Any) -> bool:
    """Whether a list's items are what `list[int]`, `tuple[float, float]` or a bare `list` says."""
    hints_of_items = [hint for hint in get_args(member) if hint is not ...]
    if len(hints_of_items) > 1 and len(hints_of_items) != len(values):
        return False
    if len(hints_of_items) == 1:
        hints_of_items *= len(values)
    return all(expected(value, hint, classes=True) is None for value, hint in zip(values, hints_of_items, strict=False))


def _words(members: Collection[Any]) -> str:
    said = [member for member in members if member not in [_IMPLIED.get(other) for other in members]]
    return " or ".join(dict.fromkeys(word for member in said for word in _word(member)))


def _word(member: Any) -> list[str]:
    if get_origin(member) is Literal:
        return [repr(value) for value in get_args(member)]
    if member in _NAMES:
        return [_NAMES[member]]
    kind = get_origin(member) or member
    if not inspect.isclass(kind):
        return ["anything"]
    if issubclass(kind, Mapping):
        return ["a mapping"]
    if not get_args(member):
        return [f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"]
    items = [_words(list(_members(hint))) for hint in get_args(member) if hint is not ...]
    return [f"[{', '.join(items)}{', ...' if len(items) == 1 else ''}]"]
