"""Making modules without memory: what Python code leaves uninitialised, as torch's modules do weights, lies on meta."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hetpipe.torch_private import give_memory


@contextmanager
def uninitialised_on_meta() -> Iterator[None]:
    """Open a context in which ``torch.empty`` makes tensors on meta, and loading into such a tensor gives it memory.

    All else is made as it is elsewhere: buffers that are computed, states of metrics, parameters with values from the
    start or from a checkpoint of somebody's. So values are lost in one case only, where code sets those of an
    uninitialised parameter, which loading or ``reset_parameters`` does again.
    """
    with warnings.catch_warnings(), _UninitialisedOnMeta():
        warnings.filterwarnings(
            "ignore", ".*copying from a non-meta parameter in the checkpoint to a meta", UserWarning
        )
        yield


class _UninitialisedOnMeta(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None and kwargs.get("out") is None:
            kwargs["device"] = "meta"
        elif func is Tensor.copy_ and args[0].is_meta and not any(each.is_meta for each in args[1:2]):
            give_memory(args[0])  # as ``load_state_dict`` fills it
        return func(*args, **kwargs)
