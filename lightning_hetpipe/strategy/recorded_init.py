"""Recorded construction: modules are made without memory, and recorded operators give the weights values later.

Under ``Trainer.init_module(empty_init=True)`` uninitialised tensors, such as torch's modules make for weights, lie on
meta. Operators on these tensors are recorded. :func:`replay` runs the operators on the host, in the same order. So
weights get the values that their constructors compute.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.threads import PerThread
from lightning_hetpipe.torch_private.graphs import arguments_of, schema_of
from lightning_hetpipe.torch_private.modes import ThreadDispatchMode
from lightning_hetpipe.torch_private.tensors import give_memory, pytree

_DATA: Any = Tensor.data
_IS_META: Any = Tensor.is_meta
_SET_DATA, _GET_IS_META = _DATA.__set__, _IS_META.__get__


@contextmanager
def recorded() -> Iterator[None]:
    """Context manager in which ``torch.empty`` makes tensors on meta, and operators on them are recorded.

    Everything else is made as usual: computed buffers, states of metrics, parameters that begin with values. Loading a
    checkpoint into a parameter on meta gives the parameter memory.
    """
    if (outer := _inside.get()) is not None:
        with _EmptyOnMeta(outer):
            yield
        return
    with warnings.catch_warnings(), _Construction() as construction, _inside.holding(construction):
        warnings.filterwarnings(
            "ignore", ".*copying from a non-meta parameter in the checkpoint to a meta", UserWarning
        )
        with _EmptyOnMeta(construction):
            yield


_inside: PerThread[_Construction] = PerThread()


def is_recorded(tensor: Tensor) -> bool:
    """Return True if :func:`replay` can give values to ``tensor``, which is on meta: something has written to it."""
    if not _is_known(tensor):
        return False
    construction, memory = _origin(tensor)
    return not tensor.numel() or memory in construction.written


def replay(tensors: Sequence[Tensor], seed: int) -> None:
    """Give recorded ``tensors`` memory on the host, and the values of a construction with random numbers of ``seed``.

    All operators run, so that random numbers do not depend on ``tensors``. Bound: the memory of ``tensors`` and of
    later operators' operands.
    """
    views = [_View.of(tensor) for tensor in tensors]
    constructions, pending = dict[_Construction, None](), [_origin(tensor)[0] for tensor in tensors]
    while pending:
        if (each := pending.pop()) not in constructions:
            constructions[each] = None
            pending.extend(each.before)
    if any(each.drew for each in constructions):  # tensors with memory have the numbers that begin with the seed
        seed = int.from_bytes(sha256(f"init_module|{seed}".encode()).digest()[:7])
    calls = sorted((call for each in constructions for call in each.calls), key=attrgetter("number"))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        memories = _run(calls, {view.memory for view in views})
    for tensor, view in zip(tensors, views, strict=True):
        give_memory(tensor, memory=view.on(memories))


def _run(calls: Sequence[_Call], wanted: set[int]) -> dict[int, torch.UntypedStorage]:
    """Run ``calls`` on the host. Return the ``wanted`` memories by number, and free others after their last use."""
    last = {view.memory: call.number for call in calls for view in call.views()}
    memories: dict[int, torch.UntypedStorage] = {}

    def again(value: Any) -> Any:
        if isinstance(value, _View):
            return value.on(memories)
        return value.clone_state() if isinstance(value, torch.Generator) else value

    dtype = torch.get_default_dtype()
    try:
        for call in calls:
            torch.set_default_dtype(call.dtype)
            args, kwargs = pytree.tree_map(again, (call.args, call.kwargs))
            results = pytree.tree_leaves(call.function(*args, **kwargs))
            for place, view in call.made.items():
                memories[view.memory] = view.holding(results[place])
            for memory in {view.memory for view in call.views()} - wanted:
                if last[memory] == call.number:
                    del memories[memory]
    finally:
        torch.set_default_dtype(dtype)
    return memories


_count = itertools.count()
"""Numbers of calls and of memories, for the whole process."""


class _Call(NamedTuple):
    """Call of an operator, with views in place of tensors on meta. ``made`` has views of new memory in its results.

    ``dtype`` is the default dtype.
    """

    number: int
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made: Mapping[int, _View]
    dtype: torch.dtype

    def views(self) -> list[_View]:
        """Return the views of all memories that the call uses."""
        given = (each for each in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(each, _View))
        return [*given, *self.made.values()]


class _Construction(ThreadDispatchMode):
    """Recorder of calls of operators on tensors on meta.

    Attributes:
        calls: Recorded calls, in their order.
        before: Earlier constructions whose tensors these calls use.
        written: Numbers of the memories that have values.
        drew: Whether random numbers were drawn for tensors with memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.before: dict[_Construction, None] = {}
        self.written: set[int] = set()
        self.drew = False

    def __enter__(self) -> _Construction:
        self._state = torch.default_generator.get_state()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.drew = not torch.equal(self._state, torch.default_generator.get_state())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        operands, results = _on_meta((args, kwargs)), _on_meta(result)
        if not operands and not results:
            return result
        written = _written(func, args, kwargs)
        if any(not each.is_meta for each in written):
            raise SettingError(
                f"a constructor in init_module(empty_init=True) writes to a tensor by {schema_of(func).name} what it"
                " computes from weights that have no values yet; make the module without empty_init=True"
            )
        if not all(map(_is_known, operands.values())):  # with an operand that was made elsewhere
            for tensor in written:
                _memories.pop(tensor.untyped_storage(), None)
            return result
        new = {place: tensor for place, tensor in results.items() if not _is_known(tensor)}
        for tensor in new.values():
            _memories[tensor.untyped_storage()] = self, next(_count)
        if new or written:
            if "empty" not in schema_of(func).name and all(map(is_recorded, operands.values())):
                self.written.update(_origin(tensor)[1] for tensor in new.values())
            self.note(func, args, kwargs, {place: _View.of(tensor) for place, tensor in new.items()}, written)
        return result

    def note(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        made: Mapping[int, _View],
        written: Sequence[Tensor],
    ) -> None:
        """Record a call. On meta it has drawn nothing: draw from a generator that it was given."""
        given = [pytree.tree_map(_noted, each) for each in (args, kwargs)]
        for tensor in _on_meta((args, kwargs)).values():
            if (other := _origin(tensor)[0]) is not self:
                self.before[other] = None
        for tensor in written:
            _, memory = _origin(tensor)
            _memories[tensor.untyped_storage()] = self, memory
            self.written.add(memory)
        self.calls.append(_Call(next(_count), function, given[0], given[1], made, torch.get_default_dtype()))
        if any(isinstance(each, torch.Generator) for each in pytree.tree_leaves(given)):
            args, kwargs = pytree.tree_map(_scratch, (args, kwargs))
            with torch.no_grad():
                function(*args, **kwargs)


_memories: WeakKeyDictionary[torch.UntypedStorage, tuple[_Construction, int]] = WeakKeyDictionary()
"""Construction that last wrote to each memory on meta, and the memory's number.

A tensor, its views and its ``data`` share memory.
"""


def _origin(tensor: Tensor) -> tuple[_Construction, int]:
    return _memories[tensor.untyped_storage()]


def _is_known(tensor: Tensor) -> bool:
    """Return True if the memory of ``tensor`` was made in a construction, and a view can stand for ``tensor``."""
    has_view = tensor.layout is torch.strided and not is_lazy(tensor) and not tensor.is_conj() and not tensor.is_neg()
    return has_view and tensor.untyped_storage() in _memories


@dataclass(frozen=True)
class _View:
    """View of memory on meta. A view keeps no tensor alive."""

    memory: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
        return cls(_origin(tensor)[1], storage.nbytes(), tensor.dtype, tensor.shape, tensor.stride(), offset)

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


def _written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that ``operator`` changes in place."""
    named = enumerate(arguments_of(operator))
    values = [args[at] if at < len(args) else kwargs.get(name) for at, (name, _, changes) in named if changes]
    return [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)]


def _noted(value: Any) -> Any:
    """Return what to record: a view for a tensor on meta, a copy of what the caller may change later."""
    if isinstance(value, torch.Generator):
        return None if value is torch.default_generator else value.clone_state()
    if isinstance(value, Tensor):
        return _View.of(value) if value.is_meta else value.detach().clone()
    return _on_host(value)


def _scratch(value: Any) -> Any:
    """Return memory of its own on the host for an argument on meta."""
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="cpu") if value.is_meta else value
    return _on_host(value)


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


class _EmptyOnMeta(TorchFunctionMode):
    """Mode that puts uninitialised tensors on meta, and lets ``construction`` record functions that skip meta."""

    def __init__(self, construction: _Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None and kwargs.get("out") is None:
            kwargs["device"] = "meta"
        if func == _GET_IS_META and args[0].is_meta and _is_known(args[0]):
            frame = sys._getframe(1)
            if frame.f_code.co_filename == nn.init.__file__:  # it does nothing for such a tensor
                names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
                given = {name: frame.f_locals[name] for name in names}
                self._construction.note(frame.f_globals[frame.f_code.co_name], (), given, {}, [args[0]])
        if func == _SET_DATA and args[0].is_meta != args[1].is_meta:  # torch sets data of one kind of memory only
            give_memory(args[0], "meta" if args[1].is_meta else "cpu")
        if func is Tensor.copy_ and isinstance(args[0], nn.Parameter) and args[0].is_meta:
            source = args[1] if len(args) > 1 else kwargs.get("other")
            if isinstance(source, Tensor) and not source.is_meta:
                give_memory(args[0])  # as ``load_state_dict`` fills it
        return func(*args, **kwargs)
