"""The look-ahead: it fetches batches ahead of Lightning's loop, so that up to Nm minibatches are in flight.

When Lightning asks for batch p, batches up to p + Nm - 1 are fetched, moved to the device and submitted. The loop and
its callbacks see the fetcher, and a resumable DataLoader, in the state at batch p (law L9). The look-ahead never passes
the end of an epoch (law L6). A batch in flight lies in memory of its own, whatever the loader does with its memory.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_hetpipe.capture.contents import attributes_of
from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.lightning_private import (
    LOADER_STATES,
    DataFetcher,
    loader_iterator,
    share_profiling,
    with_workers,
)
from lightning_hetpipe.pipeline.values import tensors_of
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.run.extensions.user_values import overlapping
from lightning_hetpipe.run.lifecycle import Extension
from lightning_hetpipe.torch_private.tensors import address_of, pytree, version_counter

if TYPE_CHECKING:
    from lightning_hetpipe.run.driver import Driver


class ReadyBatch:
    """A batch after all transfer hooks. Lightning's own transfer skips it. As a dataclass it would be searched."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


def before_transfer(redirect: Redirect, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the hook before a transfer: skip it for a batch that was transferred ahead."""
    return batch if isinstance(batch, ReadyBatch) else redirect.original(batch, *args, **kwargs)


@dataclass
class _Fetched:
    ready: ReadyBatch
    batch_idx: int
    dataloader_idx: int
    fetched: int
    done: bool
    states: list[dict[str, Any]]
    is_copy: bool


class LookAhead(DataFetcher):
    """A fetcher before Lightning's fetcher ``inner`` for one epoch."""

    def __init__(self, inner: DataFetcher, driver: Driver) -> None:
        super().__init__()
        self._combined_loader = inner.combined_loader
        self.iterator = inner.iterator
        self.length = inner.length
        self.fetched = inner.fetched
        self.done = inner.done
        self._inner = inner
        share_profiling(inner, self)  # where Lightning has told it already
        self._driver = driver
        self._waiting: deque[_Fetched] = deque()
        self._states: list[dict[str, Any]] | None = None
        self._states_of = Redirect(self.combined_loader, LOADER_STATES, self._shown_states)
        self._redirects = [self._states_of]
        self._first = True
        self._first_batch: tuple[Any, dict[int, tuple[Tensor, int]]] | None = None
        """The epoch's first batch. Later batches are compared with the addresses of its tensors."""
        self._failure: Exception | None = None

    def __iter__(self) -> LookAhead:
        iter(self._inner)
        self.iterator, self.length = self._inner.iterator, self._inner.length
        self.fetched, self.done = self._inner.fetched, self._inner.done
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._first:
            # Lightning has told us where a resumed epoch stands, and what to call around a fetch.
            self._inner.fetched = max(self._inner.fetched, self.fetched)
            share_profiling(self, self._inner)
            self._redirects += with_workers(self._inner, self._driver.unlocked, self._driver.drain)
            self._first = False
        self._driver.next_batch()
        if not self._driver.runs_ahead():
            return self._next_of_loop()
        limit = max(1, self._driver.ahead_limit())
        if self._failure is not None and not self._waiting:
            raise self._failure
        while len(self._waiting) < limit and self._failure is None and not (self._waiting and self._waiting[-1].done):
            if self._driver.copies_batches and not all(fetched.is_copy for fetched in self._waiting):
                break  # the next batch may lie in the same memory
            try:
                fetched = self._fetch()
            except StopIteration:
                if not self._waiting:
                    self.done = True
                    raise
                self._waiting[-1].done = True
                break
            except Exception as error:
                if not self._waiting:
                    raise
                self._failure = error  # it surfaces at its own batch
                break
            number = self._next_number()
            self._driver.submit(number, fetched.ready.batch, fetched.batch_idx, fetched.dataloader_idx)
            self._waiting.append(fetched)
        if len(self._waiting) > 1:  # from now on the loader only reuses memory of batches that are over
            self._first_batch = (None, {})
        current = self._waiting.popleft()
        self.fetched, self.done, self._states = current.fetched, current.done, current.states
        return current.ready, current.batch_idx, current.dataloader_idx

    def _next_of_loop(self) -> tuple[Any, int, int]:
        """Return the next batch as from Lightning's own fetcher. Hooks and transfer follow in Lightning's order."""
        try:
            fetched = self._fetch_of_inner()
            self._look_for_reuse(fetched[0])
            return fetched
        finally:
            self.fetched, self.done = self._inner.fetched, self._inner.done

    def close(self) -> None:
        """Discard batches that were fetched ahead. A checkpoint saved afterwards has the state at the last batch."""
        for redirect in self._redirects:
            redirect.remove()
        ahead = bool(self._waiting) or self._failure is not None
        self._waiting.clear()
        iterator = loader_iterator(self.combined_loader)
        if ahead and self._states and iterator is not None:
            Redirect(self.combined_loader, LOADER_STATES, partial(_left, weakref.ref(iterator), self._states))

    def _next_number(self) -> int:
        return self._driver.begun() + 1 + len(self._waiting)

    def _fetch_of_inner(self) -> tuple[Any, int, int]:
        with self._driver.doing("fetch", self._next_number()):
            fetched: tuple[Any, int, int] = next(self._inner)
            return fetched

    def _fetch(self) -> _Fetched:
        batch, batch_idx, dataloader_idx = self._fetch_of_inner()
        self._refuse_changed_memory(batch)
        self._look_for_reuse(batch)
        if is_copy := self._driver.copies_batches:
            batch = pytree.tree_map(_copied, batch)
        driver, number = self._driver, self._next_number()
        with driver.doing("look_ahead", number), driver.extensions.around(Extension.transferring, number):
            ready = ReadyBatch(driver.prepare(batch, dataloader_idx))
        return _Fetched(
            ready=ready,
            batch_idx=batch_idx,
            dataloader_idx=dataloader_idx,
            fetched=self._inner.fetched,
            done=self._inner.done,
            states=copy.deepcopy(self._states_of.original()),  # a loader may give what it goes on changing
            is_copy=is_copy,
        )

    def _look_for_reuse(self, batch: Any) -> None:
        """Notice a ``batch`` in the memory of the epoch's first batch: the loader reuses memory."""
        if self._first_batch is None:
            self._first_batch = (batch, _places(batch))
        elif (first := self._first_batch[1]) and not self._driver.copies_batches:
            self._driver.copies_batches = not first.keys().isdisjoint(_places(batch))

    def _refuse_changed_memory(self, batch: Any) -> None:
        """Refuse ``batch`` if it shares memory with a changed tensor of the epoch's first batch."""
        first = {} if self._first_batch is None else self._first_batch[1]
        changed = [each for each, counter in first.values() if version_counter(each) != counter]
        found = [each for place, (each, _) in _places(batch).items() if place not in first] if changed else []
        if any(overlapping([one, other]) for one in changed for other in found):
            raise PipelineRefusal(
                "training_step, or the loader, changes a batch in place, and batches are views of one tensor, so that"
                " those in flight would see changes of others; change a clone() of the batch"
            )

    def _shown_states(self, redirect: Redirect) -> Any:
        return redirect.original() if self._states is None else self._states


def _places(batch: Any) -> dict[int, tuple[Tensor, int]]:
    """Map the address of each tensor of ``batch`` to the tensor and the number of its in-place changes."""
    tensors = (each for leaf in pytree.tree_leaves(batch) for each in _tensors_of_leaf(leaf))
    own = (each for each in tensors if address_of(each) is not None and each.numel())
    return {each.data_ptr(): (each, version_counter(each)) for each in own}


def _attributes_of_leaf(leaf: Any) -> dict[str, Any]:
    """Return the attributes of an object of a user's class. Functions, modules and built-in values have none."""
    if callable(leaf) or type(leaf).__module__ in ("builtins", "numpy"):
        return {}
    return attributes_of(leaf)


def _tensors_of_leaf(leaf: Any) -> Sequence[Tensor]:
    """Return a tensor itself, or the tensors among the attributes of another leaf, which pytree does not see."""
    if isinstance(leaf, Tensor):
        return (leaf,)
    return tensors_of(attributes) if (attributes := _attributes_of_leaf(leaf)) else ()


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone()
    if not _tensors_of_leaf(leaf):
        return leaf
    copied = copy.copy(leaf)
    for name, value in _attributes_of_leaf(leaf).items():
        if tensors_of(value):
            object.__setattr__(copied, name, pytree.tree_map_only(Tensor, Tensor.clone, value))
    return copied


def _left(iterator: weakref.ref[Any], states: list[dict[str, Any]], redirect: Redirect) -> Any:
    """Return ``states``, in which an epoch cut short left the loader, until code iterates over it again."""
    if loader_iterator(redirect.owner) in (None, iterator()):
        return states
    redirect.remove()
    return redirect.original()
