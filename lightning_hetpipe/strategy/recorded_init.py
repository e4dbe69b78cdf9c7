"""Recorded construction of a module without memory: weights on meta, and the operators that would give them values.

Under ``Trainer.init_module(empty_init=True)``, uninitialised tensors lie on meta (torch's modules make weights from
such tensors). The operators that write to them are recorded. :func:`replay` runs these operators on the host, in order.
With an equal seed, weights equal those of a plain construction, whatever the constructor's code does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from lightning_hetpipe.torch_private.graphs import OperatorOverload, schema_of
from lightning_hetpipe.torch_private.modes import ThreadDispatchMode
from lightning_hetpipe.torch_private.tensors import give_memory, pytree

_SET_DATA: Any = Tensor.data
_SET_DATA = _SET_DATA.__set__


@contextmanager
def recorded() -> Iterator[None]:
    """Context manager in which ``torch.empty`` makes tensors on meta, and operators on these tensors are recorded.

    Computed buffers, states of metrics and parameters that begin with values are made as usual. Loading a checkpoint
    into a parameter on meta gives the parameter memory.
    """
    with warnings.catch_warnings(), _Construction(), _EmptyOnMeta():
        warnings.filterwarnings(
            "ignore", ".*copying from a non-meta parameter in the checkpoint to a meta", UserWarning
        )
        yield


def is_recorded(tensor: Tensor) -> bool:
    """Return whether :func:`replay` can give values to ``tensor``, which is on meta."""
    return tensor.layout is torch.strided and not is_lazy(tensor) and tensor.untyped_storage() in _memories


def replay(tensors: Sequence[Tensor], seed: int) -> None:
    """Give recorded ``tensors`` memory on the host, and the values of a construction with random numbers of ``seed``.

    All operators run, so that random numbers do not depend on ``tensors``. Bound: the memory of ``tensors`` and of
    later operators' operands.
    """
    views = [_View.of(tensor) for tensor in tensors]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        for construction in dict.fromkeys(view.construction for view in views):
            memories = construction.run({view.memory for view in views if view.construction is construction})
            for tensor, view in zip(tensors, views, strict=True):
                if view.construction is construction:
                    give_memory(tensor, memory=view.on(memories))


class _Call(NamedTuple):
    """Call of an operator, with views in place of tensors on meta. ``made`` has views of new memory in its results."""

    operator: OperatorOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: dict[int, _View]


class _Construction(ThreadDispatchMode):
    """Recorder of operators on tensors on meta, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._count = 0
        self._states: dict[torch.Generator, torch.Generator] = {}
        """State of each of the caller's generators at first use. On meta, operators do not draw from generators."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        operands, results = _on_meta((args, kwargs)), _on_meta(result)
        if all(map(is_recorded, operands.values())):
            new = {place: tensor for place, tensor in results.items() if not is_recorded(tensor)}
            if new or (operands and schema_of(func).is_mutable):
                given = [pytree.tree_map(self._noted, each) for each in (args, kwargs)]
                made = {place: self._new(tensor) for place, tensor in new.items()}
                self._calls.append(_Call(func, given[0], given[1], made))
        elif schema_of(func).is_mutable:  # with an operand that was made elsewhere
            for tensor in operands.values():
                _memories.pop(tensor.untyped_storage(), None)
        return result

    def run(self, wanted: set[int]) -> dict[int, torch.UntypedStorage]:
        """Run all calls on the host. Return the ``wanted`` memories by number, and free others after their last use."""
        needed = [
            {each.memory for each in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(each, _View)}
            | {view.memory for view in call.made.values()}
            for call in self._calls
        ]
        last = {memory: number for number, memories in enumerate(needed) for memory in memories}
        memories: dict[int, torch.UntypedStorage] = {}
        states = {state: state.clone_state() for state in self._states.values()}

        def again(value: Any) -> Any:
            if isinstance(value, _View):
                return value.on(memories)
            return states[value] if isinstance(value, torch.Generator) else value

        for number, call in enumerate(self._calls):
            args, kwargs = pytree.tree_map(again, (call.args, call.kwargs))
            results = pytree.tree_leaves(call.operator(*args, **kwargs))
            for place, view in call.made.items():
                memories[view.memory] = view.holding(results[place])
            for memory in needed[number]:
                if last[memory] == number and memory not in wanted:
                    del memories[memory]
        return memories

    def _noted(self, value: Any) -> Any:
        """Return a view for an argument on meta, else a copy, because the caller may change the argument later."""
        if isinstance(value, torch.Generator):
            return self._states.setdefault(value, value.clone_state())
        if isinstance(value, Tensor):
            return _View.of(value) if value.is_meta else value.detach().clone()
        return torch.device("cpu") if value == torch.device("meta") else value

    def _new(self, tensor: Tensor) -> _View:
        """Note and number the new memory of ``tensor``."""
        self._count += 1
        _memories[tensor.untyped_storage()] = self, self._count
        return _View.of(tensor)


_memories: WeakKeyDictionary[torch.UntypedStorage, tuple[_Construction, int]] = WeakKeyDictionary()
"""Construction of each memory on meta, and the memory's number. A tensor, its views and its ``data`` share memory."""


@dataclass(frozen=True)
class _View:
    """View of memory on meta that a construction has made. A view keeps no tensor alive."""

    construction: _Construction
    memory: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        storage = tensor.untyped_storage()
        construction, memory = _memories[storage]
        offset = int(tensor.storage_offset())
        return cls(construction, memory, storage.nbytes(), tensor.dtype, tensor.shape, tensor.stride(), offset)

    def on(self, memories: Mapping[int, torch.UntypedStorage]) -> Tensor:
        """Return this view as a tensor in one of ``memories`` on the host."""
        return torch.empty(0, dtype=self.dtype).set_(memories[self.memory], self.offset, self.shape, self.stride)

    def holding(self, made: Tensor) -> torch.UntypedStorage:
        """Return memory on the host in which this view has the values of ``made``."""
        storage = made.untyped_storage()
        layout = made.dtype, made.stride(), made.storage_offset(), storage.nbytes()
        if layout == (self.dtype, self.stride, self.offset, self.nbytes):
            return storage
        storage = torch.empty(self.nbytes, dtype=torch.uint8).untyped_storage()
        self.on({self.memory: storage}).copy_(made)
        return storage


def _on_meta(values: Any) -> dict[int, Tensor]:
    """Return the tensors on meta among ``values``, by their places in the tree."""
    leaves = enumerate(pytree.tree_leaves(values))
    return {place: each for place, each in leaves if isinstance(each, Tensor) and each.is_meta and not is_lazy(each)}


class _EmptyOnMeta(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None and kwargs.get("out") is None:
            kwargs["device"] = "meta"
        if func == _SET_DATA and args[0].is_meta != args[1].is_meta:  # torch sets data of one kind of memory only
            give_memory(args[0], "meta" if args[1].is_meta else "cpu")
        if func is Tensor.copy_ and args[0].is_meta and isinstance(args[1], Tensor) and not args[1].is_meta:
            if not isinstance(args[0], nn.Parameter):  # another tensor may be what the module has, in the same memory
                func(*args, **kwargs)
            give_memory(args[0])  # as ``load_state_dict`` fills it
        return func(*args, **kwargs)
