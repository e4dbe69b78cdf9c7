"""Values of user code: a module's attributes, which descriptors watch, and contents of lists, dicts, sets and objects.

Descriptors report reads and assignments of attributes, whose values stay in the module's ``__dict__``. Contents are
copied, put back and edited. An edit is what a section of user code did to a container: items that it appended, keys
that it set. An edit can be repeated on other contents. So each reader sees the edits of the minibatches before it.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, Protocol

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.contents import ABSENT, assign, items_of, refill, same_objects

_LIGHTNINGS_OWN = frozenset(vars(L.LightningModule()))


def users_attributes(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes among ``held``, a module's attributes, that Lightning does not keep for itself."""
    return {name: value for name, value in held.items() if name not in _LIGHTNINGS_OWN}


class Watcher(Protocol):
    """Interface of an object that is told of reads and assignments."""

    def reads(self, name: str) -> None:
        """Called before attribute ``name`` is read."""

    def sets(self, name: str) -> None:
        """Called after attribute ``name`` was set or deleted."""


_NO_DEFAULT = object()


class _Descriptor:
    """Descriptor of attribute ``name`` in a class. ``watchers`` has the watchers of an instance by its ``id``."""

    def __init__(self, kind: type, name: str) -> None:
        self.watchers: dict[int, list[Watcher]] = {}
        self._kind = kind
        self._name = name
        self._own = vars(kind).get(name, _NO_DEFAULT)
        self._default = inspect.getattr_static(kind, name, _NO_DEFAULT)
        setattr(kind, name, self)

    def remove(self) -> None:
        """Give the class its own attribute back."""
        if self._own is _NO_DEFAULT:
            delattr(self._kind, self._name)
        else:
            setattr(self._kind, self._name, self._own)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is not None:
            for watcher in self.watchers.get(id(instance), ()):
                watcher.reads(self._name)
            held = vars(instance)
            if self._name in held:
                return held[self._name]
        if self._default is _NO_DEFAULT:
            raise self._missing()
        bind: Callable[[Any, Any, Any], Any] | None = getattr(type(self._default), "__get__", None)
        return self._default if bind is None else bind(self._default, instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = value
        self._tell_set(instance)

    def __delete__(self, instance: Any) -> None:
        if self._name not in vars(instance):
            raise self._missing()
        del vars(instance)[self._name]
        self._tell_set(instance)

    def _missing(self) -> AttributeError:
        return AttributeError(f"'{self._kind.__name__}' object has no attribute '{self._name}'", name=self._name)

    def _tell_set(self, instance: Any) -> None:
        for watcher in self.watchers.get(id(instance), ()):
            watcher.sets(self._name)


class WatchedAttributes:
    """The attributes of ``module`` that ``watcher`` watches, without methods and properties."""

    def __init__(self, module: nn.Module, watcher: Watcher) -> None:
        self._module = module
        self._watcher = watcher
        self._found: dict[str, _Descriptor | None] = {}

    def add(self, name: str) -> None:
        """Watch attribute ``name``, if it is not watched yet."""
        if name in self._found:
            return
        kind = type(self._module)
        before = inspect.getattr_static(kind, name, None)
        is_method = callable(before) or isinstance(before, classmethod | staticmethod)
        if not isinstance(before, _Descriptor) and (is_method or hasattr(type(before), "__set__")):
            self._found[name] = None
            return
        own = vars(kind).get(name)
        watched = own if isinstance(own, _Descriptor) else _Descriptor(kind, name)
        watched.watchers.setdefault(id(self._module), []).append(self._watcher)
        self._found[name] = watched

    def close(self) -> None:
        for watched in filter(None, self._found.values()):
            own = watched.watchers[id(self._module)]
            own.remove(self._watcher)
            if not own:
                del watched.watchers[id(self._module)]
            if not watched.watchers:
                watched.remove()
        self._found.clear()


# Contents.

Time = tuple[int, float]
"""A minibatch and a section of its user code: 0 is the hooks around its transfer, 1 the first section of its step."""

Edit = Callable[[Any], Any]
"""Makes new contents of other contents."""

SCANNED = 16
"""Number of items at each end of a container that are searched for containers and tensors."""

_COPIED: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys((list, deque), list),
    **dict.fromkeys((dict, OrderedDict, defaultdict, Counter), dict),
    set: set,
}
"""Functions that copy the contents of a container, by its class."""

_FILLING: dict[type, set[str]] = {
    list: {"append", "extend"},
    deque: {"append", "extend"},
    set: {"add", "update"},
    dict: {"update"},
}
"""Methods that add to a container, whatever it holds, and return nothing."""

_OURS = __name__.rpartition(".")[0]
_NO_WORK = frozenset({"CACHE", "EXTENDED_ARG"})
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


def fills(container: Any) -> bool:
    """Return True if the user's code, which gets ``container`` now, only adds something to it."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals["__name__"].startswith(_OURS):
        frame = frame.f_back
    return frame is not None and _method_of(frame.f_code, frame.f_lasti) in _FILLING.get(type(container), ())


@cache
def _method_of(code: CodeType, offset: int) -> str | None:
    """Return the name of the method that ``code`` takes from the value of its instruction at ``offset``."""
    after = (each for each in dis.get_instructions(code) if each.offset > offset and each.opname not in _NO_WORK)
    found = next(after, None)
    return found.argval if found is not None and found.opname in ("LOAD_METHOD", "LOAD_ATTR") else None


def taken(container: Any) -> Any:
    """Copy the contents of ``container``, one level deep, as a list, a set or a dict."""
    copied = _COPIED.get(type(container))
    return dict(vars(container)) if copied is None else copied(container)


def put(container: Any, contents: Any) -> None:
    """Replace the contents of ``container`` by ``contents``."""
    refill(container if type(container) in _COPIED else vars(container), items_of(contents))


def same(one: Any, other: Any) -> bool:
    """Return True if both contents are the same objects in the same order."""
    if isinstance(one, set):
        return {*map(id, one)} == {*map(id, other)}
    return same_objects(items_of(one), items_of(other))


def edit_of(before: Any, after: Any) -> Edit:
    """Return the edit that made ``after`` of ``before``. If items of ``before`` are gone or reordered, the edit
    replaces any contents by ``after``."""
    if isinstance(before, list):
        added = after[len(before) :]
        return (lambda now: [*now, *added]) if same(before, after[: len(before)]) else (lambda now: [*after])
    if isinstance(before, set):
        added, removed = after - before, before - after
        return (lambda now: {*after}) if before and not before & after else (lambda now: (now - removed) | added)
    edit = assigned(before, after)
    is_edit = before.keys() & after.keys() or not before
    return edit if is_edit and same(edit(before), after) else lambda now: {**after}


@dataclass(frozen=True)
class Assigned:
    """Edit of a dict or of a module's attributes: it sets keys to ``values``, or removes keys with value ``ABSENT``."""

    values: Mapping[Any, Any]

    def __call__(self, now: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: value for key, value in {**now, **self.values}.items() if value is not ABSENT}


def assigned(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Assigned:
    """Return the edit that assigns or deletes, key by key, what differs."""
    pairs = {key: (before.get(key, ABSENT), after.get(key, ABSENT)) for key in {**before, **after}}
    return Assigned({key: new for key, (old, new) in pairs.items() if new is not old})


@dataclass
class TimedContents:
    """A container that sections use, with contents ``base`` before ``edits``, and ``published`` for the loop. Within a
    section, ``loops`` are the contents that the loop sees, and ``start`` the contents at the section's start."""

    held: Any
    name: str
    base: Any
    published: Any
    edits: list[tuple[Time, Edit]] = field(default_factory=list)
    users: dict[int, bool] = field(default_factory=dict)  # minibatches in flight: whether they have read it
    loops: Any = None
    start: Any = None
    is_filled: bool = False  # the section only fills it

    def enter(self, sees: Callable[[Time], bool], fills: bool = False) -> None:
        """Fill the container with what a section sees, or empty it if the section only adds to it (``fills``)."""
        self.loops, self.is_filled = self.taken(), fills
        self.start = type(self.loops)() if fills else self.seen(sees)
        self.put(self.loops, self.start)

    def leave(self, time: Time) -> bool:
        """Record the section's changes, and restore what the loop sees. Return True if there were changes."""
        contents = self.taken()
        if changed := not same(contents, self.start):
            self.record(time, self.edit_of(self.start, contents))
        self.put(contents, self.loops)
        return changed

    def taken(self) -> Any:
        return taken(self.held)

    def put(self, now: Any, contents: Any) -> None:
        if not same(now, contents):
            put(self.held, contents)

    def edit_of(self, before: Any, after: Any) -> Edit:
        return edit_of(before, after)

    def seen(self, sees: Callable[[Time], bool]) -> Any:
        contents = self.base
        for time, edit in self.edits:
            if sees(time):
                contents = self.edited(contents, edit)
        return contents

    def edited(self, contents: Any, edit: Edit) -> Any:
        new, most = edit(contents), getattr(self.held, "maxlen", None)
        return new[len(new) - most :] if most is not None and len(new) > most else new

    def record(self, time: Time, edit: Edit) -> None:
        self.edits.append((time, edit))
        self.edits.sort(key=lambda each: each[0])

    def settle(self, time: Time, seen_by_all: int) -> None:
        """Record the loop's changes, at ``time``, and forget the times of changes that all see."""
        contents = self.taken()
        if not same(contents, self.published):
            self.record(time, self.edit_of(self.published, contents))
        self.published = contents
        while self.edits and self.edits[0][0][0] <= seen_by_all:
            self.base = self.edited(self.base, self.edits.pop(0)[1])

    def publish(self, edit: Edit) -> None:
        """Apply ``edit`` to what the loop sees."""
        now = self.taken()
        self.put(now, edit(now))
        self.published = self.edited(self.published, edit)


class TimedAttributes(TimedContents):
    """The user's attributes of a module, while ``held`` are all attributes."""

    def taken(self) -> Any:
        return users_attributes(self.held)

    def put(self, now: Any, contents: Any) -> None:
        for name, value in assigned(now, contents).values.items():
            assign(self.held, name, value)

    def edit_of(self, before: Any, after: Any) -> Assigned:
        return assigned(before, after)


def ends_of(contents: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the first and last items of ``contents`` with their keys. They may be containers or tensors."""
    if isinstance(contents, set):
        return
    pairs = enumerate(contents) if isinstance(contents, list) else iter(contents.items())
    yield from islice(pairs, SCANNED)
    if len(contents) > SCANNED:
        start = max(SCANNED, len(contents) - SCANNED)
        if isinstance(contents, list):
            yield from ((index, contents[index]) for index in range(start, len(contents)))
        else:
            yield from islice(reversed(contents.items()), len(contents) - start)


def overlapping(values: Sequence[Any]) -> set[int]:
    """Return the ``id`` of each tensor or array among ``values`` that shares memory with another."""
    spans = sorted((*span, id(value)) for value in values if (span := _span(value)) is not None)
    found: set[int] = set()
    for index, (_, end, first) in enumerate(spans):
        for start, _, other in islice(spans, index + 1, None):
            if start >= end:
                break
            found |= {first, other}
    return found


def _span(value: Any) -> tuple[int, int] | None:
    """Return the first address and the end of the memory below ``value``, or None if it has no memory of its own."""
    while isinstance(value, np.ndarray) and value.base is not None:
        value = value.base
    if isinstance(value, np.ndarray):
        start: int = value.__array_interface__["data"][0]
        return start, start + value.nbytes
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        return None
    with suppress(RuntimeError):  # the storage has no memory here, as of a tensor at a host
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return None
