"""Python values that functions may reach. The places that hold them are found once, and read again and again.

Places are namespaces, containers, closures, tensors and arrays. The names in the functions' code show which places they
may read. Too many places cost only time.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain, count, islice
from types import CellType, CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.contents import (
    ABSENT,
    CONTAINERS,
    PLAIN,
    Data,
    assign,
    bytes_of,
    copy_of,
    items_of,
    kind_of,
    namespace_of,
    refill,
    same,
    same_data,
)
from lightning_hetpipe.torch_private.tensors import version_counter

DEPTH = 12
"""Largest number of followed attributes in a row. From ``self.owner[0]`` to its Trainer's counter of steps are nine."""

ITEMS = 256
"""Largest number of objects of one container that are followed."""

ENDS = 16
"""Number of compared items at each end of a longer container, if only ends are compared."""

SOURCES = 2000
"""Largest number of namespaces, containers and tensors that are watched, unless a caller bounds them."""

SMALL = 65_536
"""Largest bytes of an array that is read with other values. The contents of a larger array are compared elsewhere."""

NAMED = 3
"""Largest number of changed values that a message names."""

_DESCRIPTORS = (FunctionType, staticmethod, classmethod, property, GetSetDescriptorType, MemberDescriptorType)
_NOT_FOLLOWED = {"torch", "lightning_hetpipe", "numpy", *sys.stdlib_module_names} - {"argparse", "types"}
"""Packages whose modules and objects hold nothing that a user would change for ``forward``."""


@dataclass(frozen=True)
class _Source:
    """A place that holds values, named ``path`` for people. ``names`` are the values' names, empty for a list.

    ``read`` returns the present values. ``write`` puts earlier values back. It is None if user code cannot change the
    values, or other code puts them back.
    """

    path: str
    names: Sequence[str]
    read: Callable[[], tuple[Any, ...]]
    write: Callable[[tuple[Any, ...]], None] | None = None


@dataclass(frozen=True)
class Difference:
    """A value that differs, with its ``path``. If a container has another length, the values are all its items."""

    path: str
    before: Any
    now: Any

    def __str__(self) -> str:
        if isinstance(self.before, PLAIN) and isinstance(self.now, PLAIN):
            return f"{self.path} (it was {self.before!r}, and is {self.now!r})"
        return self.path


def told(differences: Iterable[Difference]) -> str | None:
    """Name at most ``NAMED`` of ``differences``, or return None."""
    return ", and ".join(dict.fromkeys(map(str, islice(differences, NAMED)))) or None


@dataclass(frozen=True)
class Moment:
    """Contents of all places of ``values`` at one moment.

    ``copies`` has the tensors and arrays among them, by path, each with a copy, if copies were requested.
    """

    values: ReachedValues
    contents: Sequence[tuple[Any, ...]]
    copies: Mapping[str, tuple[Data, Data]]

    def differences(self) -> Iterator[Difference]:
        """Yield each value that has changed since this moment."""
        found = set[str]()
        for each in self._exchanged():
            found.add(each.path)
            yield each
        for path, (data, copy) in self.copies.items():
            if path not in found and not same_data(data, copy):
                yield Difference(path, copy, data)

    def _exchanged(self) -> Iterator[Difference]:
        before, now = self.contents, self.values.read()
        sizes = [*map(len, before)] == [*map(len, now)]
        if sizes and all(map(operator.is_, chain.from_iterable(before), chain.from_iterable(now))):
            return
        for source, ones, others in zip(self.values.sources, before, now, strict=True):
            if len(ones) != len(others):
                yield Difference(source.path, ones, others)
            for index, (one, other) in enumerate(zip(ones, others, strict=False)):
                if not same(one, other):
                    path = ".".join(filter(None, [source.path, *source.names[index : index + 1]]))
                    yield Difference(path, one, other)

    def put_back(self) -> None:
        """Give all places what they held."""
        for source, held in zip(self.values.sources, self.contents, strict=True):
            if source.write is not None and not same(source.read(), held):
                source.write(held)
        with torch.no_grad():
            for data, copy in self.copies.values():
                if not same_data(data, copy):
                    writable: Any = data
                    writable[...] = copy


class ReachedValues:
    """Values that functions may reach if their code contains the names ``names``.

    Args:
        left_out: Objects that are not watched.
        only_ends: Whether only the ends of long containers are compared, as for user code in each minibatch.

    Attributes:
        sources: The places that hold the values.
        plain: Tensors and arrays among the values, by path, without parameters.
        parameters: Parameters of the modules among the values.
        kinds: Classes of the watched objects.
    """

    def __init__(
        self, names: Collection[str], left_out: Iterable[object], *, only_ends: bool = False, most: int = SOURCES
    ) -> None:
        self.sources: list[_Source] = []
        self.plain: dict[str, Data] = {}
        self.parameters: list[nn.Parameter] = []
        self.kinds: set[type] = set()
        self._names = frozenset(names)
        self._only_ends = only_ends
        self._most = most
        self._seen = {*map(id, left_out)}
        self._pending: deque[tuple[str, Any, int]] = deque()
        self._lost: list[str] = []  # context variables, what each thread has its own of, and iterators

    def read(self) -> list[tuple[Any, ...]]:
        """Read the contents of all sources."""
        return [source.read() for source in self.sources]

    def now(self, *, copied: bool = False) -> Moment:
        """Return the present contents, and if ``copied`` also the numbers of tensors and arrays."""
        copies = {path: (data, copy_of(data)) for path, data in self.plain.items()} if copied else {}
        return Moment(self, self.read(), copies)

    def is_lost(self, path: str) -> bool:
        """Return True if a change of ``path`` is in one thread alone, or cannot be put back, as for an iterator."""
        return any(path == own or path.startswith(f"{own}.") for own in self._lost)

    # What to watch.

    def value(self, path: str, value: Any) -> None:
        """Watch ``value``, named ``path``, after :meth:`follow` is called."""
        self._pending.append((path, value, DEPTH))

    def follow(self) -> None:
        """Watch the values given so far, and the values that these hold, near values first."""
        while self._pending:
            self._follow(*self._pending.popleft())

    def attributes(self, path: str, value: Any) -> None:
        """Watch all attributes of the object ``value``, but not their contents."""
        if id(value) not in self._seen:
            self._seen.add(id(value))
            held = vars(value)
            self._add(path, functools.partial(items_of, held), [*held, *held])

    def function(self, function: FunctionType) -> None:
        """Watch the closure, the defaults and the attributes of ``function``."""
        of = function.__qualname__
        self.namespace(of, vars(function), self._names)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        cells.pop("__class__", None)  # for super()
        if cells:
            names = [f"'{name}' in the closure of {of}" for name in cells]

            def fill(values: tuple[Any, ...]) -> None:
                for cell, value in zip(cells.values(), values, strict=True):
                    if value is not ABSENT:
                        cell.cell_contents = value

            self._add("", lambda: tuple([_content(cell) for cell in cells.values()]), names, fill)
            for name, cell in zip(names, cells.values(), strict=True):
                self.value(name, _content(cell))
        if function.__defaults__ or function.__kwdefaults__:
            name, keywords = f"a default of {of}", function.__kwdefaults__ or {}
            self._add(name, lambda: (*(function.__defaults__ or ()), function.__kwdefaults__))
            for default in (*(function.__defaults__ or ()), *keywords.values(), keywords):
                self.value(name, default)

    def namespace(
        self,
        path: str,
        holder: Mapping[str, Any],
        names: Iterable[str],
        depth: int = DEPTH,
        given: Iterable[str] = (),
        kind: type | None = None,
    ) -> None:
        """Watch the ``names`` that ``holder``, or the class ``kind``, has or may get, and their contents."""
        keys = sorted({*names} & {*holder, *given})

        def put(values: tuple[Any, ...]) -> None:
            for key, value in zip(keys, values, strict=True):
                if holder.get(key, ABSENT) is not value:
                    assign(holder if kind is None else kind, key, value)

        if keys:
            self._add(path, lambda: tuple([holder.get(key, ABSENT) for key in keys]), keys, put)
        self._pending.extend((f"{path}.{key}", holder[key], depth - 1) for key in keys if key in holder)

    def kind(self, kind: type, depth: int = DEPTH) -> None:
        """Watch the attributes of the class ``kind`` and of its bases that are neither methods nor properties."""
        for base in kind.__mro__:
            if id(base) not in self._seen and is_followed(str(base.__module__)):
                self._seen.add(id(base))
                held = vars(base)
                names = [name for name in self._names & held.keys() if is_value(held[name])]
                self.namespace(base.__qualname__, held, names, depth, kind=base)

    def _add(
        self,
        path: str,
        read: Callable[[], tuple[Any, ...]],
        names: Sequence[str] = (),
        write: Callable[[tuple[Any, ...]], None] | None = None,
    ) -> None:
        if len(self.sources) < self._most:
            self.sources.append(_Source(path, names, read, write))

    def _follow(self, path: str, value: Any, depth: int) -> None:
        """Watch what ``value`` holds, as far as functions name it."""
        if depth <= 0 or id(value) in self._seen or isinstance(value, PLAIN):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self._add(path, lambda: (version_counter(value),))
            if not isinstance(value, nn.Parameter):
                self.plain[path] = value
        elif isinstance(value, np.ndarray):
            self.plain[path] = value
            if value.nbytes <= SMALL:
                self._add(path, _bytes_of(value))
        elif isinstance(value, bytearray | array):
            self._add(path, _bytes_of(value), write=lambda values: _put_bytes(value, *values[0]))
        elif isinstance(value, ContextVar | threading.local):
            self._of_thread(path, value)
        elif isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            self._lost.append(path)
            self._add(path, lambda: (repr(value) if isinstance(value, count) else operator.length_hint(value),))
        elif isinstance(value, FunctionType):
            self.namespace(path, vars(value), self._names, depth)
        elif isinstance(value, (*CONTAINERS, tuple, frozenset)):
            self._container(path, value, depth)
        elif isinstance(value, MethodType):
            self._pending.append((path, value.__self__, depth))
        elif isinstance(value, weakref.ref):
            self._pending.append((path, value(), depth))
        elif isinstance(value, functools.partial):
            self._pending.extend((path, held, depth) for held in (value.args, value.keywords))
        elif isinstance(value, ModuleType):
            if is_followed(value.__name__):
                self.namespace(path, vars(value), self._names, depth)
        elif isinstance(value, type):
            self.kind(value, depth)
        elif isinstance(value, nn.Module) or is_followed(str(type(value).__module__)):
            self._object(path, value, depth)

    def _object(self, path: str, value: Any, depth: int) -> None:
        self.kinds.add(type(value))
        if isinstance(value, nn.Module):
            self.parameters.extend(value.parameters())
        self.kind(type(value), depth)
        self.slots(path, value, depth)
        held = namespace_of(value)
        own = [held, *(held.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules"))]
        defaults = {name for base in type(value).__mro__ for name in vars(base)}  # of the class, for any object
        for namespace in own if isinstance(value, nn.Module) else own[:1]:
            self.namespace(path, namespace, self._names, depth, defaults)

    def _of_thread(self, path: str, value: ContextVar[Any] | threading.local) -> None:
        self._lost.append(path)
        if isinstance(value, threading.local):
            self.namespace(path, vars(value), self._names, DEPTH, self._names)
            return

        def put(values: tuple[Any, ...]) -> None:
            if values[0] is not ABSENT:
                value.set(values[0])

        self._add(path, lambda: (value.get(ABSENT),), write=put)

    def slots(self, path: str, value: Any, depth: int = DEPTH) -> None:
        """Watch the slots of ``value`` that functions name, and their contents."""
        named = ((name, getattr(type(value), name, None)) for name in sorted(self._names))
        slots = {name: slot for name, slot in named if isinstance(slot, MemberDescriptorType)}

        def put(values: tuple[Any, ...]) -> None:
            for slot, held in zip(slots.values(), values, strict=True):
                if held is not ABSENT:
                    slot.__set__(value, held)

        if slots:
            self._add(path, lambda: tuple([_content(slot, value) for slot in slots.values()]), [*slots], put)
            self._pending.extend((f"{path}.{name}", _content(slot, value), depth - 1) for name, slot in slots.items())

    def _container(self, path: str, value: Any, depth: int) -> None:
        read = functools.partial(items_of, value)
        kind = kind_of(value)

        def ends() -> tuple[Any, ...]:
            if len(value) <= ITEMS:
                return read()
            return len(value), *islice(kind.__iter__(value), ENDS), *islice(reversed(value), ENDS)

        at_ends = self._only_ends and kind not in (set, frozenset)
        write = None if at_ends or kind in (tuple, frozenset) else functools.partial(refill, value)
        self._add(path, ends if at_ends else read, write=write)
        items = read()
        items = items[len(items) // 2 :] if isinstance(value, dict) else items
        followed = [item for item in items if not isinstance(item, PLAIN)]
        self._pending.extend((f"{path}[{index}]", item, depth - 1) for index, item in enumerate(followed[:ITEMS]))


def names_in(codes: Iterable[CodeType]) -> set[str]:
    """Return the names that ``codes`` read, and strings in them that may be arguments of ``getattr``."""
    found: set[str] = set()
    for code in codes:
        found.update(code.co_names)
        found.update(each for each in code.co_consts if isinstance(each, str) and each.isidentifier())
    return found


def is_value(attribute: Any) -> bool:
    """Return True if ``attribute`` of a class is neither a method nor a property."""
    return not isinstance(attribute, _DESCRIPTORS)


def _bytes_of(value: Any) -> Callable[[], tuple[tuple[bytes]]]:
    """Return a function that reads the bytes of an array, as the same object until they change."""
    held = (b"",)

    def read() -> tuple[tuple[bytes]]:
        nonlocal held
        now = (bytes_of(value),)
        held = held if held == now else now
        return (held,)

    return read


def _put_bytes(value: bytearray | array[Any], contents: bytes) -> None:
    del value[:]
    value.extend(contents) if isinstance(value, bytearray) else value.frombytes(contents)


def is_followed(module: str) -> bool:
    """Return True if objects of the ``module`` may hold what a user would change for ``forward``."""
    return module.startswith("lightning_hetpipe.demo") or module.partition(".")[0] not in _NOT_FOLLOWED


def _content(holder: CellType | MemberDescriptorType, of: Any = None) -> Any:
    try:
        return holder.cell_contents if isinstance(holder, CellType) else holder.__get__(of)
    except (ValueError, AttributeError):  # it is empty
        return ABSENT
