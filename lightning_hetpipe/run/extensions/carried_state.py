"""State that batches of an evaluation hand on: noticed on the first one, so that the evaluation runs batch by batch.

In training, a step is refused if it reads what the step before sets after a later call of a pipelined module. An
evaluation runs its batches one by one instead, as in a plain run.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hetpipe.capture.contents import CONTAINERS, attributes_of, bytes_of, plain_attributes, same
from lightning_hetpipe.pipeline.values import equal
from lightning_hetpipe.run.extensions.watched_attributes import WatchedAttributes, fills, users_attributes
from lightning_hetpipe.torch_private.tensors import version_counter

SHARED = "what batches in flight would share"
"""Name for a global, or what else is no module's own, in a message."""

DEPTH = 4
"""Containers in each other whose items are compared."""

ITEMS = 10_000
"""Most items of an attribute that are compared."""


class CarriedState:
    """Reads and changes of the first batch of an evaluation of ``root``, while this is open.

    Args:
        root: The LightningModule.
        calls: The modules that were called so far, and may turn out to be pieces.
    """

    def __init__(self, root: nn.Module, calls: Collection[nn.Module]) -> None:
        self._root = root
        self._calls = calls
        self._parts = {part: name for name, part in root.named_modules() if not isinstance(part, Metric)}
        self._contents = {part: _contents_of_attributes(part) for part in self._parts}
        self._buffers = {name: (version_counter(each), each.clone()) for name, each in root.named_buffers()}
        self._watched: dict[nn.Module, _Reads] = {}

    def watch(self, parts: Iterable[nn.Module]) -> None:
        """Watch who reads and sets attributes of ``parts``."""
        for part in parts:
            self._watched.setdefault(part, _Reads(part, self._calls))

    def close(self) -> None:
        """Watch none any more."""
        for reads in self._watched.values():
            reads.attributes.close()

    def found(self, pieces: Collection[nn.Module]) -> str | None:
        """The first thing that the batch has left for the next one, which could miss it while both are in flight, if
        ``pieces`` are pipelined; None if there is none."""
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
        """The first attribute that is set behind the call of a piece before which it is read."""
        return next((name for name, at in self.read.items() if any(is_piece[at : self._set.get(name, 0)])), None)


def _contents_of_attributes(part: nn.Module) -> dict[str, Any]:
    users = users_attributes(plain_attributes(part)).items()
    return {name: (value, *_contents(value, DEPTH, iter(range(ITEMS)))) for name, value in users}


def _contents(value: Any, depth: int, left: Iterator[int]) -> Iterator[Any]:
    """Yield the items of ``value``, to be compared, as long as there are numbers ``left``."""
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
    """Tell whether the next batch may read what was changed of an attribute, with its contents ``before`` and now."""
    if reads is not None and before[0] is not now[0]:
        return False  # `_Reads.late` has looked at this
    adds = type(before[0]) in CONTAINERS and len(now) > len(before) and same(now[: len(before)], before)
    return not same(before, now) and not (adds and reads is not None and attribute not in reads.read)
