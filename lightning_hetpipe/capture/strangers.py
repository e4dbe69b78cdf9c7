"""Objects that hold tensors where no stage would find them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_hetpipe.private import pytree


def stranger_in(value: Any) -> Any | None:
    """The first object in ``value`` that holds tensors and is no nesting of tuples, lists and dicts; None if none is.

    Such are dataclasses, subclasses of ``dict`` and objects with attributes, unless they are registered with torch's
    pytree (as Hugging Face's outputs are).
    """
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, Tensor) and _holds_tensors(leaf, set()):
            return leaf
    return None


def _holds_tensors(item: Any, seen: set[int]) -> bool:
    if isinstance(item, Tensor):
        return True
    if id(item) in seen or isinstance(item, (str, bytes, type)) or callable(item):
        return False
    seen.add(id(item))
    return any(_holds_tensors(part, seen) for part in _parts(item))


def _parts(item: Any) -> Iterable[Any]:
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, (tuple, list, set, frozenset)):
        yield from item
    yield from getattr(item, "__dict__", {}).values()
    for owner in type(item).__mro__:
        slots = vars(owner).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(item, name):
                yield getattr(item, name)
