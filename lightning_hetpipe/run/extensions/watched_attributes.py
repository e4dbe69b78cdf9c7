"""Descriptors that report reads and assignments of a module's attributes, whose values stay in its ``__dict__``."""

from __future__ import annotations

import dis
import inspect
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from types import CodeType
from typing import Any, Protocol

import lightning as L
from torch import nn

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


_FILLING: dict[type, set[str]] = {
    list: {"append", "extend"},
    deque: {"append", "extend"},
    set: {"add", "update"},
    dict: {"update"},
}
"""Methods that add to a container, whatever it holds, and return nothing."""


_OURS = __name__.rpartition(".")[0]
_NO_WORK = frozenset({"CACHE", "EXTENDED_ARG"})


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
