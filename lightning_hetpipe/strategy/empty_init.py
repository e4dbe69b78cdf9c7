"""Making modules without memory: what Python code leaves uninitialised, as torch's modules do weights, lies on meta."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hetpipe.torch_private import give_memory, version_counter


@contextmanager
def uninitialised_on_meta() -> Iterator[None]:
    """Open a context in which ``torch.empty`` makes tensors on meta, and loading into such a tensor gives it memory.

    All else is made as it is elsewhere: buffers that are computed, states of metrics, parameters with values from the
    start or from a checkpoint of somebody's. So values are lost in one case only, where code sets those of an
    uninitialised parameter. ``reset_parameters`` does so again; what else does is noted for :func:`loses_values`.
    """
    with warnings.catch_warnings(), _UninitialisedOnMeta():
        warnings.filterwarnings(
            "ignore", ".*copying from a non-meta parameter in the checkpoint to a meta", UserWarning
        )
        yield


def loses_values(tensor: Tensor) -> bool:
    """Tell whether code has given values to ``tensor`` on meta, which ``reset_parameters`` does not give again."""
    return tensor.untyped_storage() in _written


def lose_values(tensor: Tensor) -> None:
    """Put ``tensor`` on meta as one that :func:`loses_values`."""
    give_memory(tensor, "meta")
    _written.add(tensor.untyped_storage())


_written: WeakSet[torch.UntypedStorage] = WeakSet()
"""Memory on meta; a view, and ``tensor.data``, has that of its tensor."""


class _UninitialisedOnMeta(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None and kwargs.get("out") is None:
            kwargs["device"] = "meta"
        elif func is Tensor.copy_ and args[0].is_meta and not any(each.is_meta for each in args[1:2]):
            give_memory(args[0])  # as ``load_state_dict`` fills it
        target = next(iter((*args, *kwargs.values())), None)
        if not isinstance(target, Tensor) or not target.is_meta:
            return func(*args, **kwargs)
        before = version_counter(target)
        result = func(*args, **kwargs)
        if version_counter(target) != before and not _is_reset():
            _written.add(target.untyped_storage())
        return result


def _is_reset() -> bool:
    """Tell whether a module resets parameters of its own, as it does again where nothing else gives them values."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in ("reset_parameters", "_reset_parameters"):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Transformer) or (
                isinstance(module, nn.Module) and any(True for _ in module.parameters(False))
            ):
                return True
        frame = frame.f_back
    return False
