"""Making modules without memory: what Python code leaves uninitialised, as torch's modules do weights, lies on meta."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from lightning_hetpipe.pipeline.values import nested_tensors
from lightning_hetpipe.torch_private.tensors import give_memory, version_counter


@contextmanager
def uninitialised_on_meta() -> Iterator[None]:
    """Open a context in which ``torch.empty`` makes tensors on meta, and loading into such a tensor gives it memory.

    All else is made as it is elsewhere: buffers that are computed, states of metrics, parameters with values from the
    start or from a checkpoint of somebody's. So values are lost in one case only, where code sets those of an
    uninitialised parameter, or computes others from them. ``reset_parameters`` sets them again, and a copy is made
    again; all else is :data:`LOST`.
    """
    with warnings.catch_warnings(), _UninitialisedOnMeta():
        warnings.filterwarnings(
            "ignore", ".*copying from a non-meta parameter in the checkpoint to a meta", UserWarning
        )
        yield


class Origin:
    """Origin of the values that a tensor on meta would have: a call of ``reset_parameters``; copies have the same.

    Args:
        module: Whose method that is; None for memory that is not initialised.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._kind, self._module = type(module), ref(self if module is None else module)

    def is_of(self, module: nn.Module) -> bool:
        """Tell whether ``module``, or one that is gone and of its kind, has given these values."""
        mine = self._module()
        return mine is module or (mine is None and type(module) is self._kind)


LOST = Origin()
"""Origin of values that nothing gives again."""


def origin_of(tensor: Tensor) -> Origin | None:
    """The origin of ``tensor``, which is on meta; None if it was made outside of :func:`uninitialised_on_meta`."""
    if is_lazy(tensor) or (found := _origins.get(tensor.untyped_storage())) is None:
        return None
    origin, layout = found
    return origin if layout == _layout(tensor) else LOST  # a part, or in another order


def leave_on_meta(tensor: Tensor, origin: Origin | None) -> None:
    """Put ``tensor`` on meta, as one that has ``origin``."""
    give_memory(tensor, "meta")
    if origin is not None:
        _note(tensor, origin)


_Layout = tuple[torch.Size, tuple[int, ...]]

_origins: WeakKeyDictionary[torch.UntypedStorage, tuple[Origin, _Layout]] = WeakKeyDictionary()
"""Origin of memory on meta, and the layout of who made it; views, and ``tensor.data``, share memory."""


def _layout(tensor: Tensor) -> _Layout:
    return tensor.shape, tensor.stride()


def _note(tensor: Tensor, origin: Origin) -> None:
    if not is_lazy(tensor):
        _origins[tensor.untyped_storage()] = origin, _layout(tensor)


_UNINITIALISED = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}
_COPIES: set[Any] = {Tensor.clone, torch.clone, Tensor.__deepcopy__, Tensor.contiguous}
_COPIES |= {Tensor.to, Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16}
_SET_DATA: Any = Tensor.data
_SET_DATA = _SET_DATA.__set__


class _UninitialisedOnMeta(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None and kwargs.get("out") is None:
            kwargs["device"] = "meta"
        copies, sets = func is Tensor.copy_, func == _SET_DATA
        source = args[1] if (copies or sets) and len(args) > 1 and isinstance(args[1], Tensor) else None
        if source is not None and args[0].is_meta != source.is_meta:
            if args[0].is_meta:
                give_memory(args[0])  # as ``load_state_dict`` fills it
            elif sets:
                give_memory(args[0], "meta")  # torch sets data of one kind of memory only
        operands = nested_tensors([*args, *kwargs.values()])
        given = [tensor for tensor in operands if tensor.is_meta and not is_lazy(tensor)]
        before = [(tensor, version_counter(tensor)) for tensor in given]
        memory = [tensor.untyped_storage() for tensor in given]
        result = func(*args, **kwargs)
        for tensor, count in before:
            if version_counter(tensor) != count:
                _note_write(tensor, source if source is not None and source.shape == tensor.shape else None)
        for tensor in nested_tensors([result]):
            if tensor.is_meta and not any(tensor.untyped_storage() is each for each in memory):
                _note(tensor, _made(func, given))
        return result


def _note_write(tensor: Tensor, source: Tensor | None) -> None:
    """Note that somebody has written to ``tensor``, what is in ``source``, if given, and is as large."""
    before, layout = _origins.get(tensor.untyped_storage(), (None, _layout(tensor)))
    origin = LOST
    if before is not LOST and (module := _resetting()) is not None:
        origin = Origin(module)
    elif source is not None and layout == _layout(tensor):
        origin = origin_of(source) or LOST
    _origins[tensor.untyped_storage()] = origin, layout


def _made(func: Any, given: Sequence[Tensor]) -> Origin:
    """The origin of a new tensor on meta that ``func`` has made of those ``given``."""
    if func in _UNINITIALISED or _resetting() is not None:
        return Origin()
    return (origin_of(given[0]) if func in _COPIES and given else None) or LOST


def _resetting() -> nn.Module | None:
    """The module that resets parameters of its own now, as it does again where nothing else gives them values."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in ("reset_parameters", "_reset_parameters"):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Transformer) or (
                isinstance(module, nn.Module) and any(True for _ in module.parameters(False))
            ):
                return module
        frame = frame.f_back
    return None
