"""Capturing a module whose tensors lie on several devices, as they do once stages have taken layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_hetpipe.torch_private.tensors import pytree, without_memory

T = TypeVar("T")


@contextmanager
def on_one_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Within it, tensors on ``device`` stand in for those of ``module`` that lie elsewhere.

    Tracing looks at sizes and devices only, so that they need no memory, for which the device may have no room.
    """
    elsewhere = [
        (part, name, tensor)
        for part in module.modules()
        for own in (part.named_parameters, part.named_buffers)
        for name, tensor in own(recurse=False, remove_duplicate=False)
        if tensor.device != device
    ]
    stand_ins = {tensor: _empty(tensor, device) for _, _, tensor in elsewhere}  # one for each: what is tied stays tied
    try:
        for part, name, tensor in elsewhere:
            setattr(part, name, stand_ins[tensor])
        yield
    finally:
        for part, name, tensor in elsewhere:
            setattr(part, name, tensor)


def inputs_on(device: torch.device, inputs: T) -> T:
    """``inputs`` with tensors on ``device`` that stand in for those on other devices of its kind."""
    found: T = pytree.tree_map_only(
        Tensor,
        lambda each: (
            _empty(each, device).requires_grad_(each.requires_grad)
            if each.device.type == device.type and each.device != device
            else each
        ),
        inputs,
    )
    return found


def _empty(like: Tensor, device: torch.device) -> Tensor:
    tensor = without_memory(like, device)
    return nn.Parameter(tensor, like.requires_grad) if isinstance(like, nn.Parameter) else tensor
