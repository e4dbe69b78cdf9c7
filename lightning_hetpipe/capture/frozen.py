"""Python values from outside a captured module that its ``forward`` reads: a graph has frozen them.

Attributes of the module's own are followed, or refused by name, when they change (``fingerprint.py``). Here are those
that stand elsewhere: globals, closures, defaults, class attributes, attributes of other objects. Which of them may be
read is found while the module itself runs: the functions that it calls name them. Finding too many costs only time,
since a change is a reason to compare the graph with the module (``parity_check.py``), not to refuse it. A change that
the module itself makes is a side effect (``effects.py``).
"""

from __future__ import annotations

import dis
import functools
import gc
import operator
import os
import sys
import sysconfig
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from types import (
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from lightning_hetpipe.capture.data_checks import SeenAnswers
from lightning_hetpipe.capture.noticed_calls import NoticedCalls, line_for_people
from lightning_hetpipe.capture.plain_attributes import PLAIN, bytes_of, plain_attributes, refill, same
from lightning_hetpipe.torch_private.tensors import version_counter

DEPTH = 12
"""Most attributes in a row that are followed; from ``self.owner[0]`` to its Trainer's counter of steps are nine."""

ITEMS = 256
"""Most objects of one container that are followed."""

ENDS = 16
"""Items at each end of a longer container that are compared where user code runs, which does so in each minibatch."""

SOURCES = 2000
"""Most namespaces, containers and tensors that are watched."""

SMALL = 65_536
"""Most bytes of an array that is compared whenever a graph may have fallen behind; larger ones when graphs are."""

NAMED = 3
"""Most changed values that a message names."""

Values = Sequence[tuple[Any, ...]]
"""Contents of the sources, one after the other."""

_ABSENT = object()
_CONTAINERS = (list, tuple, set, frozenset, deque, OrderedDict, dict)
_DESCRIPTORS = (FunctionType, staticmethod, classmethod, property, GetSetDescriptorType, MemberDescriptorType)
_PACKAGE = Path(__file__).parent.parent
_OURS = tuple(str(path) for path in _PACKAGE.iterdir() if path.name != "demo")
_NOT_USERS = (f"{Path(torch.__file__).parent}{os.sep}", *_OURS, "<frozen")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_NOT_FOLLOWED = {"torch", "lightning_hetpipe", "numpy", *sys.stdlib_module_names} - {"argparse", "types"}
"""Packages whose modules and objects hold nothing that a user would change for ``forward``."""


@dataclass(frozen=True)
class _Source:
    """A place that holds values.

    Attributes:
        path: Its name, for people.
        names: Those of its values; empty where these have none, as the items of a list.
        read: Gives the values as they are now.
        write: Puts earlier values back; None where a user's code cannot change them, or they are put back elsewhere.
    """

    path: str
    names: Sequence[str]
    read: Callable[[], tuple[Any, ...]]
    write: Callable[[tuple[Any, ...]], None] | None = None


class FrozenValues:
    """The values outside ``module``, a live captured module, that its graphs have frozen."""

    def __init__(self, module: nn.Module) -> None:
        self.answers = SeenAnswers()
        """Answers to its decisions by values of data, when it was last watched."""
        self.checkpoints = False
        """True once it was seen to call ``torch.utils.checkpoint``."""
        self.noticed = NoticedCalls()
        """Calls that a graph would leave out, as far as the module was seen to make any."""
        self.plain: dict[str, Tensor | np.ndarray[Any, Any]] = {}
        """Tensors and arrays among these values, by their paths: no parameters, and no buffers of ``module``."""
        self._tolerated: set[str] = set()
        self._own: list[str] = []
        self._lost: list[str] = []  # context variables, what each thread has its own of, and iterators
        self._module = module
        self._called: dict[tuple[CodeType, int], dict[str, Any]] = {}
        self._names: frozenset[str] = frozenset()
        self._sources: list[_Source] = []
        self._seen: set[int] = set()
        self._kinds: set[type] = set()
        self._reads_ends = False
        self._pending: deque[tuple[str, Any, int]] = deque()
        self._replaced = False  # a value that may hold others
        self._stale = False  # what to watch is to be found anew

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within it the module itself runs, and what it may read is noted; not where somebody profiles this thread.

        Others may be noted within.
        """
        outer = sys.getprofile()
        if outer is not None and not isinstance(outer, _Called):
            yield
            return
        called, collects = _Called(self.noticed), gc.isenabled()
        gc.disable()  # what it calls is no part of forward: finalisers, and gc.callbacks that keep times
        sys.setprofile(called)
        try:
            yield
        finally:
            sys.setprofile(outer)
            if collects:
                gc.enable()
            if outer is not None:
                outer.update(called)
                outer.noticed.update(self.noticed)
            self.checkpoints |= any(code.co_filename == checkpoint.__file__ for code, _ in called)
            new = {key: names for key, names in called.items() if key not in self._called and is_users(key[0])}
            self._stale |= bool(new) or self._replaced
            self._called |= new

    def now(self) -> Values:
        """The values as they are; first of all, which ones are watched."""
        if self._stale:
            self._find()
        return [(self._sources,), *[source.read() for source in self._sources]]

    def changed(self, before: Values) -> str | None:
        """Name at most ``NAMED`` values that are not as they were ``before``, or that nobody watched then; None if
        there are none."""
        now = self.now()
        sizes = [*map(len, before)] == [*map(len, now)]
        if sizes and all(map(operator.is_, chain.from_iterable(before), chain.from_iterable(now))):
            return None
        if before[0][0] is not now[0][0]:
            return "what it reads"
        found: list[str] = []
        for path, one, other in self._differences(before, now):
            plain = isinstance(one, PLAIN) and isinstance(other, PLAIN)
            found.append(f"{path} (it was {one!r}, and is {other!r})" if plain else path)
            self._replaced |= not plain
        return ", and ".join(dict.fromkeys(found[:NAMED])) or None

    def put_back(self, before: Values) -> None:
        """Give sources the values that they had ``before``, since when no other sources were found."""
        for source, values in zip(self._sources, before[1:], strict=True):
            if source.write is not None and not same(source.read(), values):
                source.write(values)

    def tolerate(self, paths: Iterable[str]) -> None:
        """Let the module change the values at ``paths`` while it is traced, as it did not change them in a real run."""
        self._tolerated.update(paths)

    def changes(self, before: Values) -> list[str]:
        """The paths of values that are not as they were ``before``, except of those that are tolerated."""
        found = dict.fromkeys(path for path, _, _ in self._differences(before, self.now()))
        return [path for path in found if path not in self._tolerated]

    def _differences(self, before: Values, now: Values) -> Iterator[tuple[str, Any, Any]]:
        """Yield the path of each value that differs, with both values; for another length the container's path."""
        for source, ones, others in zip(self._sources, before[1:], now[1:], strict=True):
            if len(ones) != len(others):
                yield source.path, ones, others
            for index, (one, other) in enumerate(zip(ones, others, strict=False)):
                if not same(one, other):
                    yield ".".join(filter(None, [source.path, *source.names[index : index + 1]])), one, other

    def is_own(self, path: str) -> bool:
        """Tell whether ``path`` is an attribute of the module or of its parts, or lies in one."""
        return any(path == own or path.startswith((f"{own}.", f"{own}[")) for own in self._own)

    def is_lost(self, path: str) -> bool:
        """Tell whether a change of ``path`` would be in one thread alone, or cannot be put back, as an iterator's."""
        return any(path == own or path.startswith(f"{own}.") for own in self._lost)

    def line_of(self, path: str) -> str | None:
        """The first line of the functions that were called which names the last part of ``path``, for people."""
        name = path.partition("' in the closure")[0].rpartition("'")[2] or path
        parts = [part.partition("[")[0] for part in reversed(name.split("."))]
        for part in parts:
            for code, _ in self._called:
                if (line := _line_that_names(code, part)) is not None:
                    return line_for_people(code.co_filename, line)
        return None

    # What to watch.

    def reach(
        self,
        functions: Iterable[FunctionType],
        roots: Mapping[str, Any],
        parts: Iterable[tuple[str, nn.Module]],
        left_out: Iterable[object],
    ) -> set[type]:
        """Watch what ``functions`` may reach by their names, from ``roots`` and from attributes of ``parts``.

        Objects in ``left_out``, globals and closures are not watched.

        Returns:
            The classes of the objects that are watched.
        """
        self._sources, self.plain, self._kinds, self._reads_ends = [], {}, set(), True
        for each in functions:
            self._called |= {(code, id(each.__globals__)): each.__globals__ for code in _codes(each.__code__)}
        self._names = frozenset(name for code, _ in self._called for name in _names(code))
        self._seen = {*map(id, left_out), *map(id, self._module.modules())}
        self._pending.extend((path, value, DEPTH) for path, value in roots.items() if path in self._names)
        for path, part in parts:
            defaults = {name for base in type(part).__mro__ for name, value in vars(base).items() if _is_value(value)}
            names = self._names & (plain_attributes(part).keys() | defaults)
            self._namespace(path, vars(part), names, DEPTH, defaults)
        while self._pending:
            self._follow(*self._pending.popleft())
        return self._kinds

    def _find(self) -> None:
        parts = dict(self._module.named_modules())
        self.plain, self._own, self._lost = {}, [], []
        self._sources, self._seen = [], {id(part) for part in parts.values()}
        self._replaced = self._stale = False
        codes = {id(code): code for code, _ in self._called}
        self._names = frozenset(name for code in codes.values() for name in _names(code))
        for globals_ in {id(names): names for names in self._called.values()}.values():
            read = {name for (code, _), names in self._called.items() if names is globals_ for name in code.co_names}
            self._namespace(globals_.get("__name__", "a module"), globals_, read, DEPTH)
        for function in gc.get_referrers(*codes.values()):
            if isinstance(function, FunctionType) and id(function.__code__) in codes:
                self._function(function)
        for path, part in parts.items():
            self._class(type(part), DEPTH)
            attributes = plain_attributes(part)  # fingerprint.py sees to these themselves
            for name in sorted(self._names & attributes.keys()):
                self._own.append(f"{path or type(part).__name__}.{name}")
                self._pending.append((self._own[-1], attributes[name], DEPTH))
        while self._pending:  # what is near first
            self._follow(*self._pending.popleft())

    def _function(self, function: FunctionType) -> None:
        """Watches the closure and the defaults of ``function``."""
        of = function.__qualname__
        self._namespace(of, vars(function), self._names, DEPTH)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        cells.pop("__class__", None)  # for super()
        if cells:
            names = [f"'{name}' in the closure of {of}" for name in cells]

            def fill(values: tuple[Any, ...]) -> None:
                for cell, value in zip(cells.values(), values, strict=True):
                    if value is not _ABSENT:
                        cell.cell_contents = value

            self._add("", lambda: tuple([_content(cell) for cell in cells.values()]), names, fill)
            self._pending.extend(
                (name, _content(cell), DEPTH) for name, cell in zip(names, cells.values(), strict=True)
            )
        if function.__defaults__ or function.__kwdefaults__:
            name, keywords = f"a default of {of}", function.__kwdefaults__ or {}
            self._add(name, lambda: (*(function.__defaults__ or ()), function.__kwdefaults__))
            defaults = (*(function.__defaults__ or ()), *keywords.values(), keywords)
            self._pending.extend((name, default, DEPTH) for default in defaults)

    def _add(
        self,
        path: str,
        read: Callable[[], tuple[Any, ...]],
        names: Sequence[str] = (),
        write: Callable[[tuple[Any, ...]], None] | None = None,
    ) -> None:
        if len(self._sources) < SOURCES:
            self._sources.append(_Source(path, names, read, write))

    def _namespace(
        self,
        path: str,
        holder: Mapping[str, Any],
        names: Iterable[str],
        depth: int,
        given: Iterable[str] = (),
        kind: type | None = None,
    ) -> None:
        """Watches those of ``names`` that ``holder``, or the class ``kind``, has or may get, and their contents."""
        keys = sorted({*names} & {*holder, *given})

        def put(values: tuple[Any, ...]) -> None:
            for key, value in zip(keys, values, strict=True):
                if holder.get(key, _ABSENT) is not value:
                    _put(holder if kind is None else kind, key, value)

        if keys:
            self._add(path, lambda: tuple([holder.get(key, _ABSENT) for key in keys]), keys, put)
        self._pending.extend((f"{path}.{key}", holder[key], depth - 1) for key in keys if key in holder)

    def _class(self, kind: type, depth: int) -> None:
        """Watches the attributes of ``kind`` and of its bases that are neither methods nor properties."""
        for base in kind.__mro__:
            if id(base) not in self._seen and _top(str(base.__module__)) not in _NOT_FOLLOWED:
                self._seen.add(id(base))
                held = vars(base)
                names = [name for name in self._names & held.keys() if _is_value(held[name])]
                self._namespace(base.__qualname__, held, names, depth, kind=base)

    def _follow(self, path: str, value: Any, depth: int) -> None:
        """Watches what ``value`` holds, as far as functions that were called name it."""
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
            self._namespace(path, vars(value), self._names, depth)
        elif isinstance(value, _CONTAINERS):
            self._container(path, value, depth)
        elif isinstance(value, MethodType):
            self._pending.append((path, value.__self__, depth))
        elif isinstance(value, functools.partial):
            self._pending.extend((path, held, depth) for held in (value.args, value.keywords))
        elif isinstance(value, ModuleType):
            if _top(value.__name__) not in _NOT_FOLLOWED:
                self._namespace(path, vars(value), self._names, depth)
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, nn.Module) or _top(str(type(value).__module__)) not in _NOT_FOLLOWED:
            self._kinds.add(type(value))
            self._class(type(value), depth)
            self._slots(path, value, depth)
            held = _attributes(value)
            own = [held, *(held.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules"))]
            defaults = {name for base in type(value).__mro__ for name in vars(base)}  # of the class, for any object
            for namespace in own if isinstance(value, nn.Module) else own[:1]:
                self._namespace(path, namespace, self._names, depth, defaults)

    def _of_thread(self, path: str, value: ContextVar[Any] | threading.local) -> None:
        self._lost.append(path)
        if isinstance(value, threading.local):
            self._namespace(path, vars(value), self._names, DEPTH, self._names)
            return

        def put(values: tuple[Any, ...]) -> None:
            if values[0] is not _ABSENT:
                value.set(values[0])

        self._add(path, lambda: (value.get(_ABSENT),), write=put)

    def _slots(self, path: str, value: Any, depth: int) -> None:
        named = ((name, getattr(type(value), name, None)) for name in sorted(self._names))
        slots = {name: slot for name, slot in named if isinstance(slot, MemberDescriptorType)}

        def put(values: tuple[Any, ...]) -> None:
            for slot, held in zip(slots.values(), values, strict=True):
                if held is not _ABSENT:
                    slot.__set__(value, held)

        if slots:
            self._add(path, lambda: tuple([_content(slot, value) for slot in slots.values()]), [*slots], put)
            self._pending.extend((f"{path}.{name}", _content(slot, value), depth - 1) for name, slot in slots.items())

    def _container(self, path: str, value: Any, depth: int) -> None:
        kind: Any = next(kind for kind in _CONTAINERS if isinstance(value, kind))  # a subclass may load what it gives

        def items() -> tuple[Any, ...]:
            return tuple(kind.values(value)) if issubclass(kind, dict) else tuple(kind.__iter__(value))

        def all_of_dict() -> tuple[Any, ...]:
            return (*kind.__iter__(value), *items())

        read = all_of_dict if issubclass(kind, dict) else items

        def ends() -> tuple[Any, ...]:
            if len(value) <= ITEMS:
                return read()
            return len(value), *islice(kind.__iter__(value), ENDS), *islice(reversed(value), ENDS)

        write = None if kind in (tuple, frozenset) else functools.partial(refill, value)
        at_ends = self._reads_ends and kind not in (set, frozenset)
        self._add(path, ends if at_ends else read, write=None if at_ends else write)
        followed = [item for item in items() if not isinstance(item, PLAIN)]
        self._pending.extend((f"{path}[{index}]", item, depth - 1) for index, item in enumerate(followed[:ITEMS]))


class _Called(dict[tuple[CodeType, int], dict[str, Any]]):
    """Functions that are called while this profiles: their codes, with their globals.

    By both, as functions of two files whose lines are the same have codes that are equal.
    """

    def __init__(self, noticed: NoticedCalls) -> None:
        super().__init__()
        self.noticed = noticed

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            self.setdefault((frame.f_code, id(frame.f_globals)), frame.f_globals)
            self.noticed.call(frame)
        elif event == "c_call":
            self.noticed.c_call(frame, called)


def _line_that_names(code: CodeType, name: str) -> int | None:
    """The line of ``code`` in which it first names ``name``."""
    if name not in (*code.co_names, *code.co_freevars, *code.co_cellvars):
        return None
    naming = (each.positions for each in dis.get_instructions(code) if each.argval == name)
    positions = next(naming, None)
    return None if positions is None else positions.lineno


def _put(holder: Any, key: str, value: Any) -> None:
    """Give ``holder``, a namespace or a class, this ``value``, or none."""
    if isinstance(holder, type):
        delattr(holder, key) if value is _ABSENT else setattr(holder, key, value)
    elif value is _ABSENT:
        holder.pop(key, None)
    else:
        holder[key] = value


def _bytes_of(value: Any) -> Callable[[], tuple[tuple[bytes]]]:
    """Return a function that reads the bytes of an array: one object as long as they are the same."""
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


def is_users(code: CodeType) -> bool:
    """Tell whether it is neither torch's code, nor Python's, nor ours."""
    file = code.co_filename
    if file.startswith(_NOT_USERS):
        return False
    return file.startswith(PACKAGES) or not file.startswith(_STANDARD_LIBRARY)


def _is_value(attribute: Any) -> bool:
    """Return True if ``attribute`` of a class is neither a method nor a property."""
    return not isinstance(attribute, _DESCRIPTORS)


def _top(module: str) -> str:
    return "" if module.startswith("lightning_hetpipe.demo") else module.partition(".")[0]


def _names(code: CodeType) -> Iterator[str]:
    """The names that it reads; also those that it may give to ``getattr``."""
    yield from code.co_names
    yield from (value for value in code.co_consts if isinstance(value, str) and value.isidentifier())


def _codes(code: CodeType) -> Iterator[CodeType]:
    """``code`` and the code of the functions within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _attributes(value: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _content(holder: CellType | MemberDescriptorType, of: Any = None) -> Any:
    try:
        return holder.cell_contents if isinstance(holder, CellType) else holder.__get__(of)
    except (ValueError, AttributeError):  # it is empty
        return _ABSENT
