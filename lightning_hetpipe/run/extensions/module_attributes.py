"""Attributes of the LightningModule while ``training_step`` runs ahead of Lightning's loop (laws L1, L8 and L9).

``self.x, self.y = batch`` in ``training_step``, ``pl_module.beta = ...`` in a callback: with several minibatches in
flight, whoever reads such an attribute would find what somebody else has left there a moment ago. So every assignment
has a time, and each reader sees those before a time of its own:

- Lightning's loop and callbacks, between steps p and p + 1: what ``training_step`` of minibatches up to p has set.
- ``training_step`` of minibatch p: what it has set itself; of earlier minibatches what they had set at the same place,
  between the same two calls of pipelined modules (what comes later there may not have run yet); and what callbacks have
  set by the version that its weights are of (max(v_e, p - Nm) under weight stashing). A callback's assignment after
  step v so comes before the first minibatch that uses version v, and replaces what minibatches before that one have
  set: a counter that is reset starts anew there.

Assignments count, not changes inside a list or another object: those everybody sees at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
from torch import nn

from lightning_hetpipe.pipeline.user.user_section import UserSection
from lightning_hetpipe.rules.versions import Versions
from lightning_hetpipe.run.lifecycle import Around, Extension

Time = tuple[int, float]
"""A minibatch, and which section of its user code: 0 is the hooks around its transfer, 1 the first of its step."""

_ABSENT = object()
_LIGHTNINGS_OWN = frozenset(vars(L.LightningModule()))
_CALLBACKS = -1.0  # before every section of the minibatch


class Attributes(Extension):
    """The attributes of ``module``, the LightningModule or a part of it that runs as user code.

    ``versions`` gives the versions that minibatches use.

    The module holds what Lightning's loop sees, except within :meth:`seen`. Only one thread at a time may use this,
    the one that holds the lock over user code.
    """

    def __init__(self, module: nn.Module, versions: Callable[[], Versions]) -> None:
        self._held = vars(module)
        self._versions = versions
        self.emptied(versions().empty_at)

    def transferring(self, minibatch: int) -> Around:
        return self.seen(minibatch, 0)

    def section(self, minibatch: int) -> UserSection:
        return _AttributesSection(self, minibatch)

    def emptied(self, version: int) -> None:
        """The pipeline starts empty at ``version``: all see what the module holds."""
        self._published = self._users()
        self._set: dict[str, list[tuple[Time, Any]]] = {}

    def continues(self, version: int) -> None:
        """Step ``version`` is over: what callbacks have set belongs to it."""
        now = self._users()
        for name in now.keys() | self._published.keys():
            before, value = self._published.get(name, _ABSENT), now.get(name, _ABSENT)
            if value is not before:
                self._record(name, (self._versions().first_reader(version), _CALLBACKS), before, value)
        self._published = now
        seen_by_all = self._versions().version(version + 1)
        for name, assignments in self._set.items():
            old = [index for index, ((minibatch, _), _) in enumerate(assignments) if minibatch <= seen_by_all]
            self._set[name] = assignments[old[-1] :] if old else assignments

    def arrived(self, minibatch: int) -> None:
        """Lightning's loop is at step ``minibatch``, and sees what that has set."""
        for name, assignments in self._set.items():
            for (owner, section), value in assignments:
                if owner == minibatch and section != _CALLBACKS:
                    self._put(name, value)
                    _assign(self._published, name, value)

    @contextmanager
    def seen(self, minibatch: int, number: int) -> Iterator[None]:
        """Have the module hold, within it, what section ``number`` of ``minibatch``'s user code sees."""
        self.enter(minibatch, number)
        try:
            yield
        finally:
            self.leave()

    def enter(self, minibatch: int, number: int) -> None:
        self._now = (minibatch, float(number))
        loops = self._users()
        seen = {name: self._seen(name, assignments) for name, assignments in self._set.items()}
        for name in loops.keys() | self._published.keys():  # callbacks may have set more, which is not published yet
            seen.setdefault(name, self._published.get(name, _ABSENT))
        self._swapped = {name: loops.get(name, _ABSENT) for name in seen if loops.get(name, _ABSENT) is not seen[name]}
        for name in self._swapped:
            self._put(name, seen[name])
        self._at_start = self._users()

    def leave(self) -> None:
        left = self._users()
        for name in left.keys() | self._at_start.keys():
            before, value = self._at_start.get(name, _ABSENT), left.get(name, _ABSENT)
            if value is not before:
                self._record(name, self._now, self._published.get(name, _ABSENT), value)
                self._swapped.setdefault(name, before)
        for name, value in self._swapped.items():
            self._put(name, value)

    def _seen(self, name: str, assignments: list[tuple[Time, Any]]) -> Any:
        minibatch, number = self._now
        version = self._versions().version(minibatch)
        newest = self._published.get(name, _ABSENT)
        for (owner, section), value in assignments:  # in order of time
            if owner <= version or (owner <= minibatch and section <= number):
                newest = value
        return newest

    def _record(self, name: str, time: Time, before: Any, value: Any) -> None:
        assignments = self._set.setdefault(name, [((self._versions().empty_at, _CALLBACKS), before)])
        assignments[:] = [(then, old) for then, old in assignments if then != time]
        assignments.append((time, value))
        assignments.sort(key=lambda assignment: assignment[0])

    def _users(self) -> dict[str, Any]:
        return {name: value for name, value in self._held.items() if name not in _LIGHTNINGS_OWN}

    def _put(self, name: str, value: Any) -> None:
        _assign(self._held, name, value)


def _assign(held: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        held.pop(name, None)
    else:
        held[name] = value


class _AttributesSection:
    """Has the LightningModule hold the attributes that a minibatch's sections see, one after the other."""

    def __init__(self, attributes: Attributes, minibatch: int) -> None:
        self._attributes = attributes
        self._minibatch = minibatch
        self._entered = 0

    def enter(self) -> None:
        self._entered += 1
        self._attributes.enter(self._minibatch, self._entered)

    def leave(self, for_good: bool = False) -> None:
        self._attributes.leave()
