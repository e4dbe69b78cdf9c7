"""Python values from outside a captured module that its ``forward`` reads, and that a graph has frozen.

Attributes of the module itself are followed, or refused by name, when they change (``fingerprint.py``). This file is
about globals, closures, defaults, class attributes, and attributes of other objects. While the module runs, the names
in the functions that it calls show which values it may read. After a change, the graph is compared with the module
(``parity_check.py``), not refused. A change by the module itself is a side effect (``effects.py``).
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.utils import checkpoint

from lightning_hetpipe.capture.contents import PLAIN, plain_attributes
from lightning_hetpipe.capture.noticed_calls import NoticedCalls, is_users, line_that_names
from lightning_hetpipe.capture.reached_values import Moment, ReachedValues, is_followed, names_in, told
from lightning_hetpipe.capture.variant import SeenAnswers


class FrozenValues:
    """The values outside ``module``, a live captured module, that its graphs have frozen."""

    def __init__(self, module: nn.Module) -> None:
        self.answers = SeenAnswers()
        """Answers to its decisions by values of data, when it was last watched."""
        self.checkpoints = False
        """True after it was seen to call ``torch.utils.checkpoint``."""
        self.noticed = NoticedCalls()
        """Calls that the module was seen to make and a graph would leave out."""
        self.tolerated: set[str] = set()
        """Paths of values that the module may change while it is traced, as it did not change them in a real run."""
        self._own: list[str] = []
        self._module = module
        self._called: dict[tuple[CodeType, int], dict[str, Any]] = {}
        self._reached = ReachedValues((), ())
        self._replaced = False  # a value that may hold others
        self._stale = False  # what to watch is to be found anew

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context manager that profiles the module's forward, and records its functions and noticed calls.

        If another profiler runs in this thread, record nothing, and warn. Contexts may be nested.
        """
        outer, self.noticed = sys.getprofile(), NoticedCalls()  # calls of an evaluation are not those of a minibatch
        if outer is not None and not isinstance(outer, NoticedCalls):
            warnings.warn(
                f"another profiler of Python ({type(outer).__name__}) runs, so that side effects of"
                f" {type(self._module).__name__}.forward and changes of what it reads outside the module may go"
                " unnoticed; train without that profiler, or set in_flight=1",
                stacklevel=2,
            )
            yield
            return
        noticed, collects = self.noticed, gc.isenabled()
        gc.disable()  # what it calls is no part of forward: finalisers, and gc.callbacks that keep times
        sys.setprofile(noticed)
        try:
            yield
        finally:
            sys.setprofile(outer)
            if collects:
                gc.enable()
            called, noticed.functions = noticed.functions, {}
            if outer is not None:
                outer.update(noticed)
                outer.functions.update(called)
            self.checkpoints |= any(code.co_filename == checkpoint.__file__ for code, _ in called)
            new = {
                key: names
                for key, names in called.items()
                if key not in self._called and is_users(key[0]) and not _is_generated(key[0], names)
            }
            self._stale |= bool(new) or self._replaced
            self._called |= new

    @property
    def reached(self) -> ReachedValues:
        """Values that may be read by functions that the module was seen to call."""
        if self._stale:
            self._find()
        return self._reached

    def changed(self, before: Moment) -> str | None:
        """Name some values that have changed since ``before`` or were not watched then, or return None."""
        if before.values is not self.reached:
            return "what it reads"
        found = [*before.differences()]
        self._replaced |= not all(isinstance(value, PLAIN) for each in found for value in (each.before, each.now))
        return told(found)

    def changes(self, before: Moment) -> list[str]:
        """Return the paths of values that have changed since ``before``, without tolerated changes."""
        return [
            path for path in dict.fromkeys(each.path for each in before.differences()) if path not in self.tolerated
        ]

    def is_own(self, path: str) -> bool:
        """Return True if ``path`` is an attribute of the module or of its parts, or lies in such an attribute."""
        return any(path == own or path.startswith((f"{own}.", f"{own}[")) for own in self._own)

    def line_of(self, path: str) -> str | None:
        """Return for people the first line of the called functions that names the last part of ``path``."""
        return line_that_names([code for code, _ in self._called], path)

    def _find(self) -> None:
        parts = dict(self._module.named_modules())
        names = names_in(code for code, _ in self._called)
        self._reached = reached = ReachedValues(names, parts.values())
        self._own, self._replaced, self._stale = [], False, False
        for globals_ in {id(held): held for held in self._called.values()}.values():
            read = {name for (code, _), held in self._called.items() if held is globals_ for name in code.co_names}
            reached.namespace(globals_.get("__name__", "a module"), globals_, read)
        for function in _functions(self._called):
            reached.function(function)
        for path, part in parts.items():
            reached.kind(type(part))
            reached.slots(path or type(part).__name__, part)
            attributes = plain_attributes(part)  # fingerprint.py sees to these themselves
            for name in sorted(names & attributes.keys()):
                self._own.append(f"{path or type(part).__name__}.{name}")
                reached.value(self._own[-1], attributes[name])
        reached.follow()


def _is_generated(code: CodeType, globals_: Mapping[str, Any]) -> bool:
    """Return True if a library has written ``code`` for a class of its own, as ``dataclasses`` does."""
    return code.co_filename == "<string>" and not is_followed(str(globals_.get("__name__")))


def _functions(called: Mapping[tuple[CodeType, int], Mapping[str, Any]]) -> Iterator[FunctionType]:
    """Yield the functions with the code of ``called``, which also has their globals."""
    unknown: dict[int, CodeType] = {}
    for (code, _), globals_ in called.items():
        first, *rest = code.co_qualname.split(".")
        found: Any = globals_.get(first)
        for part in rest:
            found = getattr(found, "__dict__", {}).get(part)
        if isinstance(found, FunctionType) and found.__code__ is code:
            yield found
        else:  # such as a closure, of which there may be several: all objects are looked through
            unknown[id(code)] = code
    for function in gc.get_referrers(*unknown.values()) if unknown else ():
        if isinstance(function, FunctionType) and id(function.__code__) in unknown:
            yield function
