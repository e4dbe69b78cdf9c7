"""Values that user code reaches from its module, and that all minibatches in flight share.

Each minibatch has its own attributes, and its own contents of what they hold (``module_attributes.py``). Values that
lie deeper have one state for all minibatches: an object in a dict in a list, an attribute of a submodule, a view of
another tensor's memory. A step that changes such a value is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_hetpipe.capture.contents import plain_attributes
from lightning_hetpipe.capture.noticed_calls import PACKAGES, is_users, line_that_names
from lightning_hetpipe.capture.reached_values import Moment, ReachedValues, is_value, names_in, told
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.user.user_section import SectionBetween, UserSection
from lightning_hetpipe.rules.versions import Versions
from lightning_hetpipe.run.extensions.watched_attributes import users_attributes
from lightning_hetpipe.run.lifecycle import Extension

_NOT_USERS = {"torch", "lightning", "pytorch_lightning", "torchmetrics", "builtins"}
_COMPARED = 64
"""Sections, from an empty pipeline on, in which contents of tensors and of large arrays are compared as well."""


class SharedValues(Extension):
    """Refuses changes, by the user's step, of values that minibatches in flight share.

    Comes before the :class:`Attributes` of a run: what those keep apart is as it was when they have left.

    Args:
        module: The LightningModule.
        pieces: The pipelined modules, whose stages run without user code.
        versions: Gives the versions that minibatches use.
        way_out: What a user can do, for the error.
    """

    def __init__(
        self,
        module: nn.Module,
        pieces: Collection[nn.Module],
        versions: Callable[[], Versions],
        way_out: str = "set in_flight=1",
    ) -> None:
        self._module = module
        self._versions = versions
        self._way_out = way_out
        inside = {part for piece in pieces for part in piece.modules()}
        self._parts = [
            (path, part)
            for path, part in module.named_modules()
            if path and part not in inside and not isinstance(part, Metric)
        ]
        self._kinds = {type(part) for part in (module, *(part for _, part in self._parts))}
        self._functions: list[FunctionType] = []
        self._before: Moment | None = None
        self._roots: dict[str, Any]
        self.emptied(0)

    def section(self, minibatch: int) -> UserSection:
        return SectionBetween(self.enter, partial(self.leave, minibatch))

    def emptied(self, version: int) -> None:
        """The pipeline starts empty: take what the module holds now."""
        self._failure: SettingError | None = None
        self._replaced: set[str] = set()
        self._sections = 0
        self._find()

    def arrived(self, minibatch: int) -> None:
        if self._failure is not None:
            raise self._failure

    def enter(self) -> None:
        held = vars(self._module)
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
                f"the step of batch {minibatch} changes {changed} of {type(self._module).__name__}"
                f"{f' ({line})' if line else ''}, which batches in flight share, so that what a batch reads there would"
                f" depend on timing; {self._way_out}"
            )
        if self._failure is not None:
            raise self._failure

    def closed(self) -> None:
        self._roots.clear()
        self._reached = ReachedValues((), ())

    def _find(self) -> None:
        held = vars(self._module)
        self._reached, self._roots = ReachedValues((), ()), {}
        if not self._versions().runs_ahead:
            return
        self._roots = {name: each for name, each in users_attributes(held).items() if name not in self._replaced}
        left_out = [*self._module.parameters(), *self._module.buffers(), *self._module.modules(), held["_trainer"]]
        roots = {**self._roots, "hparams": held.get("_hparams")}
        known = -1
        while len(self._kinds) > known:  # objects of other classes may be reached by these classes' methods
            known = len(self._kinds)
            found = functions_of(self._kinds, roots.values(), type(self._module).__module__.partition(".")[0])
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
    """Yield the methods of ``kinds`` and of their bases, the functions among ``values``, and the functions that these
    name: all that belong to the user, or to ``package``."""
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
    """``code`` and the code of the functions within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _top(value: type | FunctionType) -> str:
    return (value.__module__ or "").partition(".")[0]
