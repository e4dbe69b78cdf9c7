"""Contents of lists, dicts, sets, deques and plain objects: taken, put back, and changes of them as edits.

An edit is what a section of user code did to a container: items that it appended, keys that it set. An edit can be done
again on other contents. So each reader sees the edits of the minibatches before it.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.contents import items_of, refill, same_objects

Edit = Callable[[Any], Any]
"""Makes new contents of other contents."""

SCANNED = 16
"""Items at each end of a container in which containers and tensors are looked for."""

_COPIED: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys((list, deque), list),
    **dict.fromkeys((dict, OrderedDict, defaultdict, Counter), dict),
    set: set,
}
"""Functions that copy the contents of a container, by its class."""

_OBJECTS = frozenset({"types", "argparse"})
_NOT_USERS = (sys.stdlib_module_names | {"torch", "lightning", "torchmetrics", "numpy", "lightning_hetpipe"}) - _OBJECTS
_NO_STATE = nn.Module | Tensor | type | ModuleType | FunctionType | torch.Generator


def is_container(value: Any) -> bool:
    """Return True if ``value`` is a container, or an object of a user's class."""
    kind = type(value)
    if kind in _COPIED:
        return True
    if isinstance(value, _NO_STATE) or kind.__module__.partition(".")[0] in _NOT_USERS:
        return False
    return type(getattr(value, "__dict__", None)) is dict or kind is SimpleNamespace


def taken(container: Any) -> Any:
    """Copy the contents of ``container``, one step deep: as a list, a set or a dict."""
    copied = _COPIED.get(type(container))
    return dict(vars(container)) if copied is None else copied(container)


def put(container: Any, contents: Any) -> None:
    """Make ``contents`` those of ``container``."""
    refill(container if type(container) in _COPIED else vars(container), items_of(contents))


def same(one: Any, other: Any) -> bool:
    """Return True if both contents are the same objects in the same order."""
    if isinstance(one, set):
        return {*map(id, one)} == {*map(id, other)}
    return same_objects(items_of(one), items_of(other))


def edit_of(before: Any, after: Any) -> Edit:
    """Find the edit that made ``after`` of ``before``.

    Where items of ``before`` are gone, or have another order, whatever contents are replaced by ``after``.
    """
    if isinstance(before, list):
        added = after[len(before) :]
        return (lambda now: [*now, *added]) if same(before, after[: len(before)]) else (lambda now: [*after])
    if isinstance(before, set):
        added, removed = after - before, before - after
        return (lambda now: {*after}) if before and not before & after else (lambda now: (now - removed) | added)
    gone = [key for key in before if key not in after]
    changed = {key: value for key, value in after.items() if key not in before or before[key] is not value}
    if before and len(gone) == len(before):
        return lambda now: {**after}

    def edited(now: dict[Any, Any]) -> dict[Any, Any]:
        return {key: value for key, value in now.items() if key not in gone} | changed

    return edited if same(edited(before), after) else lambda now: {**after}


def ends_of(contents: Any) -> Iterator[tuple[Any, Any]]:
    """The first and last items of ``contents`` with their keys, in which more containers and tensors may be."""
    if isinstance(contents, set):
        return
    pairs = enumerate(contents) if isinstance(contents, list) else iter(contents.items())
    yield from islice(pairs, SCANNED)
    if len(contents) > SCANNED:
        start = max(SCANNED, len(contents) - SCANNED)
        if isinstance(contents, list):
            yield from ((index, contents[index]) for index in range(start, len(contents)))
        else:
            last = [*islice(reversed(contents.items()), len(contents) - start)]
            yield from last


def overlapping(values: Sequence[Any]) -> set[int]:
    """The ``id`` of each tensor or array among ``values`` whose memory another one of them has, too."""
    spans = sorted((*span, id(value)) for value in values if (span := _span(value)) is not None)
    found: set[int] = set()
    for index, (_, end, first) in enumerate(spans):
        for start, _, other in islice(spans, index + 1, None):
            if start >= end:
                break
            found |= {first, other}
    return found


def _span(value: Any) -> tuple[int, int] | None:
    """First address and end of the memory that ``value`` is a view of; None if it has none of its own."""
    while isinstance(value, np.ndarray) and value.base is not None:
        value = value.base
    if isinstance(value, np.ndarray):
        start: int = value.__array_interface__["data"][0]
        return start, start + value.nbytes
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        return None
    with suppress(RuntimeError):  # of a storage without memory here, as a tensor's of a host
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return None
