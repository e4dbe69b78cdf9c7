"""Values that minibatches, or batches of an evaluation, share or hand on to the next, reached from the module.

Each minibatch has its own attributes, and its own contents of what they hold (``module_attributes.py``). Deeper values
have one state for all minibatches: an object in a dict in a list, an attribute of a submodule, a view of another
tensor's memory. A step that changes such a value is refused by name.

In training, a step is also refused if it reads what the step before sets after a later call of a pipelined module. An
evaluation notices on its first batch what batches hand on, and then runs them one by one, as in a plain run.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hetpipe.capture.contents import CONTAINERS, attributes_of, bytes_of, plain_attributes, same
from lightning_hetpipe.capture.noticed_calls import PACKAGES, is_users, line_that_names
from lightning_hetpipe.capture.reached_values import Moment, ReachedValues, is_value, names_in, told
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.user.user_section import UserSection
from lightning_hetpipe.pipeline.values import equal
from lightning_hetpipe.rules.versions import Versions
from lightning_hetpipe.run.extensions.user_values import WatchedAttributes, fills, users_attributes
from lightning_hetpipe.run.lifecycle import Extension
from lightning_hetpipe.torch_private.tensors import version_counter

_NOT_USERS = {"torch", "lightning", "pytorch_lightning", "torchmetrics", "builtins"}
_COMPARED = 64
"""Number of sections after an empty pipeline in which contents of tensors and large arrays are compared as well."""


@dataclass(eq=False)
class SharedValues(Extension):
    """A guard that refuses changes, by the user's step, of values that minibatches in flight share. ``pieces`` are the
    pipelined modules of ``module``, whose stages run without user code."""

    module: nn.Module
    pieces: Collection[nn.Module]
    versions: Callable[[], Versions]
    way_out: str = "set in_flight=1"

    def __post_init__(self) -> None:
        inside = {part for piece in self.pieces for part in piece.modules()}
        self._parts = [
            (path, part)
            for path, part in self.module.named_modules()
            if path and part not in inside and not isinstance(part, Metric)
        ]
        self._kinds = {type(part) for part in (self.module, *(part for _, part in self._parts))}
        self._functions: list[FunctionType] = []
        self._before: Moment | None = None
        self._roots: dict[str, Any]
        self.emptied(0)

    def section(self, minibatch: int) -> UserSection:
        return UserSection(self.enter, partial(self.leave, minibatch))

    def emptied(self, version: int) -> None:
        """Take what the module holds now, because the pipeline starts empty."""
        self._failure: SettingError | None = None
        self._replaced: set[str] = set()
        self._sections = 0
        self._find()

    def arrived(self, minibatch: int) -> None:
        if self._failure is not None:
            raise self._failure

    def enter(self) -> None:
        held = vars(self.module)
        if replaced := {name for name, value in self._roots.items() if held.get(name) is not value}:
            self._replaced |= replaced  # by each minibatch, which has its own then
            self._find()
        self._sections += 1
        self._before = self._reached.now(copied=self._sections <= _COMPARED)

    def leave(self, minibatch: int) -> None:
        if self._before is None:  # `enter` has failed
            return
        changed, self._before = told(self._before.differences()), None
        if changed is not None and self._failure is None:
            line = line_that_names([each.__code__ for each in self._functions], changed.partition(" ")[0])
            self._failure = SettingError(
                f"the step of batch {minibatch} changes {changed} of {type(self.module).__name__}"
                f"{f' ({line})' if line else ''}, which batches in flight share, so that what a batch reads there would"
                f" depend on timing; {self.way_out}"
            )
        if self._failure is not None:
            raise self._failure

    def closed(self) -> None:
        self._roots.clear()
        self._reached = ReachedValues((), ())

    def _find(self) -> None:
        held = vars(self.module)
        self._reached, self._roots = ReachedValues((), ()), {}
        if not self.versions().runs_ahead:
            return
        self._roots = {name: each for name, each in users_attributes(held).items() if name not in self._replaced}
        left_out = [*self.module.parameters(), *self.module.buffers(), *self.module.modules(), held["_trainer"]]
        roots = {**self._roots, "hparams": held.get("_hparams")}
        known = -1
        while len(self._kinds) > known:  # objects of other classes may be reached by these classes' methods
            known = len(self._kinds)
            found = functions_of(self._kinds, roots.values(), type(self.module).__module__.partition(".")[0])
            self._functions = sorted(found, key=lambda each: "step" not in each.__name__)  # first named in an error
            names = names_in(code for each in self._functions for code in _codes(each.__code__))
            self._reached = ReachedValues(names, left_out, only_ends=True)
            for name, value in roots.items():
                if name in names:
                    self._reached.value(name, value)
            for path, part in self._parts:
                defaults = {name for base in type(part).__mro__ for name, each in vars(base).items() if is_value(each)}
                own = names & (plain_attributes(part).keys() | defaults)
                self._reached.namespace(path, vars(part), own, given=defaults)
            self._reached.follow()
            self._kinds |= self._reached.kinds


def functions_of(kinds: Iterable[type], values: Iterable[object], package: str) -> Iterator[FunctionType]:
    """Yield functions of the user or ``package``: methods of ``kinds``, ``values``, and functions that these name."""
    bases = {base: None for kind in kinds for base in kind.__mro__ if _top(base) not in _NOT_USERS}
    pending = [*values, *(each for base in bases for each in vars(base).values())]
    seen: set[CodeType] = set()
    while pending:
        value: Any = pending.pop()
        value = getattr(value, "__func__", getattr(value, "fget", value))  # of a classmethod, of a property
        function = inspect.unwrap(value) if isinstance(value, FunctionType) else value
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        file = function.__code__.co_filename
        if is_users(function.__code__) and (_top(function) == package or not file.startswith(PACKAGES)):
            seen.add(function.__code__)
            yield function
            pending.extend(map(function.__globals__.get, function.__code__.co_names))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield ``code`` and the code of the functions within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _top(value: type | FunctionType) -> str:
    return (value.__module__ or "").partition(".")[0]


SHARED = "what batches in flight would share"
"""Name in a message for a global, or another value outside of modules."""

DEPTH = 4
"""Depth of nested containers whose items are compared."""

ITEMS = 10_000
"""Largest number of items of an attribute that are compared."""


class CarriedState:
    """Reads and changes in the first batch of an evaluation of ``root``, while this is open. ``calls`` are the modules
    that were called so far. They may turn out to be pieces."""

    def __init__(self, root: nn.Module, calls: Collection[nn.Module]) -> None:
        self._root = root
        self._calls = calls
        self._parts = {part: name for name, part in root.named_modules() if not isinstance(part, Metric)}
        self._contents = {part: _contents_of_attributes(part) for part in self._parts}
        self._buffers = {name: (version_counter(each), each.clone()) for name, each in root.named_buffers()}
        self._watched: dict[nn.Module, _Reads] = {}

    def watch(self, parts: Iterable[nn.Module]) -> None:
        """Watch reads and assignments of attributes of ``parts``."""
        for part in parts:
            self._watched.setdefault(part, _Reads(part, self._calls))

    def close(self) -> None:
        for reads in self._watched.values():
            reads.attributes.close()

    def found(self, pieces: Collection[nn.Module]) -> str | None:
        """Return the first value that the batch left for the next one, or None. With ``pieces`` pipelined, the next
        batch could miss the value while both are in flight."""
        inside = {part for piece in pieces for part in piece.modules()}
        own = {id(buffer) for piece in pieces for buffer in piece.buffers()}
        for name, buffer in self._root.named_buffers():
            counter, before = self._buffers.get(name, (-1, buffer))
            if id(buffer) not in own and (counter != version_counter(buffer) or not equal(before, buffer)):
                return f"the buffer '{name}'"
        for part, reads in self._watched.items():
            if part not in inside and (attribute := reads.late([call in pieces for call in self._calls])) is not None:
                return self._told(part, attribute)
        for part, earlier in self._contents.items():
            now = _contents_of_attributes(part) if part not in inside else {}
            for attribute in earlier.keys() & now.keys():
                if _is_carried(earlier[attribute], now[attribute], self._watched.get(part), attribute):
                    return self._told(part, attribute)
        return None

    def _told(self, part: nn.Module, attribute: str) -> str:
        return f"'{'.'.join(filter(None, [self._parts.get(part), attribute]))}'"


class _Reads:
    """Reads and assignments of the attributes of ``part``, each with the number of ``calls`` before it."""

    def __init__(self, part: nn.Module, calls: Collection[nn.Module]) -> None:
        self._part = part
        self._calls = calls
        self.read: dict[str, int] = {}
        self._set: dict[str, int] = {}
        self.attributes = WatchedAttributes(part, self)
        for name in plain_attributes(part):
            self.attributes.add(name)

    def reads(self, name: str) -> None:
        if name not in self._set and not fills(vars(self._part).get(name)):
            self.read.setdefault(name, len(self._calls))

    def sets(self, name: str) -> None:
        self._set[name] = len(self._calls)

    def late(self, is_piece: list[bool]) -> str | None:
        """Return the first attribute that is read before the call of a piece and set after it."""
        return next((name for name, at in self.read.items() if any(is_piece[at : self._set.get(name, 0)])), None)


def _contents_of_attributes(part: nn.Module) -> dict[str, Any]:
    users = users_attributes(plain_attributes(part)).items()
    return {name: (value, *_contents(value, DEPTH, iter(range(ITEMS)))) for name, value in users}


def _contents(value: Any, depth: int, left: Iterator[int]) -> Iterator[Any]:
    """Yield the items of ``value`` for comparison, as long as there are numbers ``left``."""
    if isinstance(value, Tensor):
        yield version_counter(value)
    elif isinstance(value, np.ndarray | bytearray | array):
        yield bytes_of(value)
    elif depth and not isinstance(value, nn.Module | type | str | bytes) and not callable(value):
        held: Any = value if isinstance(value, (*CONTAINERS, tuple)) else attributes_of(value)
        items = held.items() if isinstance(held, dict) else ((None, item) for item in held)
        for _, (key, item) in zip(left, items, strict=False):
            yield (key, item, *_contents(item, depth - 1, left))


def _is_carried(before: tuple[Any, ...], now: tuple[Any, ...], reads: _Reads | None, attribute: str) -> bool:
    """Return True if the next batch may read the change of an attribute, from contents ``before`` to ``now``."""
    if reads is not None and before[0] is not now[0]:
        return False  # `_Reads.late` has looked at this
    adds = type(before[0]) in CONTAINERS and len(now) > len(before) and same(now[: len(before)], before)
    return not same(before, now) and not (adds and reads is not None and attribute not in reads.read)
