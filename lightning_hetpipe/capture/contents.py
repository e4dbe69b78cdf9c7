"""Contents of containers, objects and namespaces: read, compared, and put back."""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Sequence
from types import MemberDescriptorType
from typing import Any

ABSENT = object()
"""Value of a name that a namespace lacks."""

PLAIN = (int, float, complex, str, bytes, bool, type(None))

CONTAINERS = (dict, list, set, deque)
"""Containers whose items may be exchanged."""


def with_contents(value: Any) -> Any:
    """``value``, of a container with its items."""
    return (value, *items_of(value)) if isinstance(value, CONTAINERS) else value


def items_of(container: Any) -> tuple[Any, ...]:
    """The items of one of ``CONTAINERS``; of a dict its keys, then its values."""
    return (*container, *container.values()) if isinstance(container, dict) else tuple(container)


def refill(container: Any, items: Sequence[Any]) -> None:
    """Give one of ``CONTAINERS`` the ``items`` that :func:`items_of` has given earlier, and no others."""
    container.clear()
    if isinstance(container, dict):
        half = len(items) // 2
        (dict if isinstance(container, Counter) else type(container)).update(
            container, zip(items[:half], items[half:], strict=True)
        )
    elif isinstance(container, set):
        container.update(items)
    else:
        container.extend(items)


def assign(holder: Any, name: str, value: Any) -> None:
    """Give ``holder``, a namespace or a class, this ``value``, or none."""
    if isinstance(holder, type):
        delattr(holder, name) if value is ABSENT else setattr(holder, name, value)
    elif value is ABSENT:
        holder.pop(name, None)
    else:
        holder[name] = value


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that ``value`` itself holds, in its ``__dict__`` and in slots."""
    found = dict(getattr(value, "__dict__", {}))
    for owner in type(value).__mro__:
        slots = (name for name, each in vars(owner).items() if isinstance(each, MemberDescriptorType))
        found |= {name: getattr(value, name) for name in slots if name != "__dict__" and hasattr(value, name)}
    return found


def bytes_of(value: Any) -> bytes:
    """The contents of a ``bytearray``, an ``array``, or an array of numpy."""
    return bytes(value) if isinstance(value, bytearray) else bytes(value.tobytes())


def same_objects(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Tell whether both are the same objects in the same order."""
    return len(ones) == len(others) and all(map(operator.is_, ones, others))


def same(one: Any, other: Any) -> bool:
    """Return True for the same object, for equal numbers or strings, and for tuples of these."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) in PLAIN and bool(one == other)
