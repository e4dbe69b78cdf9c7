"""Attributes of the LightningModule while ``training_step`` runs ahead of Lightning's loop (laws L1, L8 and L9).

Examples are ``self.x, self.y = batch`` in ``training_step`` and ``pl_module.beta = ...`` in a callback. With several
minibatches in flight, a plain attribute would hold whatever any of them left there last. So every assignment has a
time, and each reader sees the assignments before a time of its own:

- Lightning's loop and callbacks, between steps p and p + 1, see what ``training_step`` of minibatches up to p has set.
- ``training_step`` of minibatch p sees its own assignments. Of earlier minibatches it sees assignments up to the same
  place, between the same two calls of pipelined modules. Of callbacks it sees assignments up to the version of its
  weights (max(v_e, p - Nm) under weight stashing). So a callback's assignment after step v comes before the first
  minibatch that uses version v, and replaces earlier minibatches' assignments: a counter that is reset starts anew
  there.

A step is refused if it reads an attribute that an earlier minibatch in flight sets at a later place, unless the step
sets it first. Contents count like assignments. A section of user code may change a list, dict, set, deque or object in
an attribute, or in a container there. The change is an edit with a time (``user_values.py``). A tensor or numpy
array that is changed in place counts as replaced: a section of a minibatch gets its own copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.contents import ABSENT
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.user.user_section import UserSection
from lightning_hetpipe.pipeline.values import equal
from lightning_hetpipe.rules.versions import Versions
from lightning_hetpipe.run.extensions.replay import Replay
from lightning_hetpipe.run.extensions.shared_values import SharedValues
from lightning_hetpipe.run.extensions.user_values import (
    Assigned,
    Time,
    TimedAttributes,
    TimedContents,
    WatchedAttributes,
    assigned,
    edit_of,
    ends_of,
    fills,
    is_container,
    overlapping,
    put,
    taken,
    users_attributes,
)
from lightning_hetpipe.run.lifecycle import Around, Extension
from lightning_hetpipe.torch_private.tensors import version_counter

_CALLBACKS = -1.0  # before every section of the minibatch
_DEPTH = 2
"""Depth at which contents count: an attribute's contents, and the contents of what it holds."""


@dataclass
class _Copied:
    """A tensor or array that a section uses, with its copy, if any, that replaces it in ``holder``."""

    name: str
    holder: Any
    key: Any
    original: Any
    copy: Any
    version: int
    is_own: bool

    def end(self) -> bool:
        """Return True if the section changed it. Otherwise put the original back in the place of the copy."""
        changed = self.is_changed()
        if not changed and self.copy is not None:
            _exchange(self.holder, self.key, self.copy, self.original)
        return changed

    def is_changed(self) -> bool:
        value = self.original if self.copy is None else self.copy
        if isinstance(value, Tensor):
            if version_counter(value) != self.version:
                return True
            return self.copy is not None and not equal(self.copy, self.original)  # by .data or numpy, without a count
        return bool(value.tobytes() != self.original.tobytes())


@dataclass(eq=False)
class Attributes(Extension):
    """The attributes of ``module``, the LightningModule or a part of it that runs as user code.

    ``versions`` returns the versions that minibatches use. ``versioned`` returns, by name, the live weights and buffers
    that have versions. The module holds what Lightning's loop sees, except within :meth:`seen`. While nothing runs
    ahead, all see it. Only the thread that holds the lock over user code may use this object.
    """

    after = (Replay, SharedValues)  # stand-ins come first, and values kept apart here are not compared

    module: nn.Module
    versions: Callable[[], Versions]
    way_out: str = "set in_flight=1"
    versioned: Callable[[], Mapping[str, Tensor]] = dict

    def __post_init__(self) -> None:
        self._held = vars(self.module)
        self._kind = type(self.module).__name__
        self._is_inside = False  # within a section
        self._watched = WatchedAttributes(self.module, self)
        self._now: Time | None = None
        self._constant: dict[str, bool] = {}  # by name: whether the first section left the tensor unchanged
        self.emptied(self.versions().empty_at)

    def transferring(self, minibatch: int) -> Around:
        return self.seen(minibatch, 0)

    def section(self, minibatch: int) -> UserSection:
        numbers = count(1)
        return UserSection(lambda: self.enter(minibatch, next(numbers)), self.leave)

    def emptied(self, version: int) -> None:
        """Start with an empty pipeline at ``version``: all see what the module holds."""
        self._is_idle = not self.versions().runs_ahead
        held = users_attributes(self._held)
        self._own = TimedAttributes(self._held, "", held, held)
        self._containers: dict[int, TimedContents] = {}
        self._lent: dict[int, list[_Copied]] = {}
        self._read: dict[Hashable, set[Time]] = {}
        self._failure: SettingError | None = None
        self._arrays = self._find_arrays()
        self._aliases = overlapping([*_data_in(held.values())]) if not self._is_idle else set()
        for name in held:
            self._watched.add(name)

    def closed(self) -> None:
        self._watched.close()

    def continues(self, version: int) -> None:
        """Settle step ``version``, which is over and to which the callbacks' assignments belong."""
        if self._is_idle:
            return
        time = self.versions().first_reader(version), _CALLBACKS
        for container in (self._own, *self._containers.values()):
            container.settle(time, self.versions().version(version + 1))
            container.users = {user: reads for user, reads in container.users.items() if user > version}
        self._containers = {key: each for key, each in self._containers.items() if each.edits or each.users}
        self._lent = {user: copies for user, copies in self._lent.items() if user > version}
        read = {key: {time for time in times if time[0] > version} for key, times in self._read.items()}
        self._read = {key: times for key, times in read.items() if times}

    def arrived(self, minibatch: int) -> None:
        """Show the assignments of ``minibatch`` to Lightning's loop, which is at its step."""
        if self._failure is not None:  # a stage may have ended the minibatch before its last section failed
            raise self._failure
        for container in (self._own, *self._containers.values()):
            for (owner, section), edit in container.edits:
                if owner == minibatch and section != _CALLBACKS:
                    container.publish(edit)

    @contextmanager
    def seen(self, minibatch: int, number: int) -> Iterator[None]:
        """Context manager in which the module holds what section ``number`` of ``minibatch``'s user code sees."""
        self.enter(minibatch, number)
        try:
            yield
        finally:
            self.leave()

    def enter(self, minibatch: int, number: int) -> None:
        self._is_inside = True
        if self._is_idle:
            return
        time = (minibatch, float(number))
        self._own.enter(lambda then: self._sees(then, time))
        for name in self._own.start:
            self._watched.add(name)
        self._assigned: set[str] = set()
        self._opened: dict[int, TimedContents] = {}
        self._copied: list[_Copied] = []
        self._touched: set[str] = set()
        self._looked_into: set[int] = set()
        self._now = time
        for container in [each for each in self._containers.values() if minibatch in each.users]:
            reads = container.users[minibatch]
            self._open(container.name, container.held, fills=not reads)  # the step may have kept what it got before
            if reads:
                self._reads(container.name, id(container.held), [then for then, _ in container.edits])

    def leave(self) -> None:
        self._is_inside = False
        if self._now is None:
            return
        own, time, self._now = self._own, self._now, None
        try:
            self._end_copies(time)
            for key, container in self._opened.items():
                if container.leave(time):
                    self._check_readers(container.name, key, time)
        finally:
            left = own.taken()
            also = {name: left.get(name, ABSENT) for name in self._assigned}
            if values := {**assigned(own.start, left).values, **also}:
                own.record(time, Assigned(values))
            for name in values:
                self._check_readers(name, name, time)
            own.put(left, own.loops)
        if self._failure is not None:
            raise self._failure

    # What the user's code reads and sets.

    def sets(self, name: str) -> None:
        if self._now is not None:
            self._assigned.add(name)

    def reads(self, name: str) -> None:
        is_known = self._now is not None and (name in self._assigned or name in self._touched)
        if self._arrays and self._is_inside and not is_known:
            found = (self._arrays.get(id(each)) for each in _data_in([self._held.get(name)]))
            if (array := next(filter(None, found), None)) is not None:
                raise self._fail(
                    f"'{name}' of {self._kind} holds a numpy array in the memory of '{array[1]}', where the step would"
                    " read what another batch has left",
                    "keep a copy() of the array, or set in_flight=1",
                )
        if self._now is None or is_known:
            return
        edits = self._own.edits
        times = [time for time, edit in edits if isinstance(edit, Assigned) and name in edit.values]
        is_own = self._reads(name, name, times)
        value = self._held.get(name)
        if is_container(value):
            if fills(value):
                self._open(name, value, fills=True)
                return
            self._look_into(name, value, _DEPTH)
        elif _is_data(value):
            self._use(name, self._held, name, value, is_own)
        self._touched.add(name)

    def _find_arrays(self) -> dict[int, tuple[Any, str]]:
        """Return each array, by ``id``, in the memory of a live tensor with versions, and the tensor's name."""
        arrays = [each for each in _data_in(self._own.published.values()) if isinstance(each, np.ndarray)]
        if not arrays:
            return {}
        versioned = self.versioned().items()
        # While nothing runs ahead of the optimizer's steps, weights do not change.
        tensors = [pair for pair in versioned if not (self._is_idle and isinstance(pair[1], nn.Parameter))]
        near = overlapping([*arrays, *(tensor for _, tensor in tensors)])
        pairs = ((array, path, tensor) for array in arrays if id(array) in near for path, tensor in tensors)
        return {id(array): (array, path) for array, path, tensor in pairs if overlapping([array, tensor])}

    def _open(self, name: str, held: Any, fills: bool = False) -> TimedContents:
        """Fill ``held`` with what this section sees, or empty it if the section only adds to it (``fills``)."""
        assert self._now is not None
        now, added = self._now, None
        container = self._opened.get(id(held))
        if container is not None:
            if fills or not container.is_filled:
                return container
            added = taken(held)
            put(held, container.loops)
        elif (container := self._containers.get(id(held))) is None:
            loops = taken(held)
            container = self._containers[id(held)] = TimedContents(held, name, loops, loops)
        self._opened[id(held)] = container
        container.users.setdefault(now[0], False)
        container.enter(lambda time: self._sees(time, now), fills)
        if added:
            put(held, edit_of(type(added)(), added)(container.start))
        return container

    def _look_into(self, name: str, held: Any, depth: int) -> None:
        """Open the contents of ``held``, which this section reads, and the containers and tensors in it."""
        container = self._open(name, held)
        if id(held) in self._looked_into:
            return
        self._looked_into.add(id(held))
        if self._now is not None:
            container.users[self._now[0]] = True
        self._reads(container.name, id(held), [time for time, _ in container.edits])
        for key, item in [*ends_of(taken(held))]:
            if _is_data(item):
                self._use(name, held, key, item, False)
            elif depth > 1 and is_container(item):
                self._look_into(name, item, depth - 1)

    def _use(self, name: str, holder: Any, key: Any, value: Any, is_own: bool) -> None:
        """Put a copy of the tensor or array ``value`` into ``holder`` at ``key``, in case it is changed in place. A
        tensor that the first section left unchanged, or that the minibatch has set, is not copied. Tensors and arrays
        that share memory are not copied either: ``shared_values.py`` refuses changes of them."""
        copied: Any = None
        version = 0
        if id(value) in self._aliases:  # a copy would not change with the other one
            if isinstance(value, np.ndarray):
                return
            version = version_counter(value)
        elif isinstance(value, np.ndarray):
            copied = value.copy()
        elif not value.is_inference() and (is_own or value.requires_grad or self._constant.get(name, False)):
            version = version_counter(value)
        else:
            with torch.inference_mode(False):  # where changes are counted
                copied = value.clone()
            version = version_counter(copied)
        if copied is not None:
            _exchange(holder, key, value, copied)
        self._copied.append(_Copied(name, holder, key, value, copied, version=version, is_own=is_own))

    def _end_copies(self, time: Time) -> None:
        for each in self._lent.setdefault(time[0], []):
            if each.is_changed():
                self._fail(
                    f"'{each.name}' of {self._kind} holds a tensor that the step of batch {time[0]} has got before a"
                    " call of a pipelined module, and changes in place after it"
                )
        for each in self._copied:
            changed = each.end()
            if each.copy is not None and not changed:
                self._lent[time[0]].append(each)
            if each.copy is not None:
                self._constant[each.name] = not changed and self._constant.get(each.name, True)
            elif changed and each.is_own:
                self._assigned.add(each.name)
            elif changed:
                self._fail(
                    f"'{each.name}' of {self._kind} holds a tensor that the step of batch {time[0]} has changed in"
                    " place, while other batches that may read it are in flight"
                )

    def _sees(self, time: Time, reader: Time) -> bool:
        (owner, section), (minibatch, number) = time, reader
        return owner <= self.versions().version(minibatch) or (owner <= minibatch and section <= number)

    def _is_late(self, time: Time, reader: Time) -> bool:
        """Return True if ``reader`` does not see here what was set at ``time``, but would in a plain run."""
        return time[1] != _CALLBACKS and time[0] < reader[0] and not self._sees(time, reader)

    def _reads(self, name: str, key: Hashable, times: list[Time]) -> bool:
        """Record that section ``_now`` reads what was set at ``times``. Return True if its own minibatch set it."""
        now = self._now
        assert now is not None
        if any(owner == now[0] and 0 <= section <= now[1] for owner, section in times):
            return True
        self._read.setdefault(key, set()).add(now)
        if late := [time for time in times if self._is_late(time, now)]:
            raise self._refuse(name, late[-1], now)
        return False

    def _check_readers(self, name: str, key: Hashable, time: Time) -> None:
        """Refuse readers that should have seen what was set at ``time``."""
        if late := [reader for reader in self._read.get(key, ()) if self._is_late(time, reader)]:
            self._refuse(name, time, min(late))

    def _refuse(self, name: str, time: Time, reader: Time) -> SettingError:
        return self._fail(
            f"'{name}' of {self._kind} is read by the step of batch {reader[0]}, and the step of batch {time[0]}, which"
            " is in flight at the same time, changes it after a later call of a pipelined module, so that the value of"
            " an earlier batch would be read"
        )

    def _fail(self, why: str, way_out: str | None = None) -> SettingError:
        """Make this section fail, and all later ones, even if user code swallows the error."""
        self._failure = self._failure or SettingError(f"{why}; {way_out or self.way_out}")
        return self._failure


def _data_in(values: Iterable[Any], depth: int = _DEPTH) -> Iterator[Any]:
    """Yield the tensors and arrays among ``values`` and in their containers."""
    for value in values:
        if _is_data(value):
            yield value
        elif depth and is_container(value):
            yield from _data_in((item for _, item in ends_of(taken(value))), depth - 1)


def _is_data(value: Any) -> bool:
    """Return True if ``value`` may be changed in place, and is no container."""
    return type(value) is Tensor or type(value) is np.ndarray


def _exchange(holder: Any, key: Any, old: Any, new: Any) -> None:
    """Put ``new`` in the place of ``old`` in ``holder``, at ``key`` unless items have moved meanwhile."""
    if isinstance(holder, list | deque):
        for index, item in enumerate(holder):
            if item is old:
                holder[index] = new
        return
    held = holder if isinstance(holder, dict) else vars(holder)
    if held.get(key) is old:
        held[key] = new
