"""State of an optimizer: it lies where its parameters lie, and moves there one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.pipeline.values import nested_tensors
from lightning_hetpipe.torch_private.tensors import address_of

Change = Callable[[Any, Tensor], Tensor]
"""Function from the name of a state, if it has one, and its tensor to the tensor that replaces it."""


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Move every state to its parameter's device, as torch does when it loads a state. Dtypes stay.

    A step counter on the host stays there, unless ``capturable`` or ``fused`` asks for it on the device.
    """
    _move(optimizer, lambda parameter: parameter.device)


def leave_before_parameters(optimizer: torch.optim.Optimizer, moving: Callable[[Tensor], bool]) -> None:
    """Move the states of parameters that are ``moving`` to the host, so that their devices have room."""
    _move(optimizer, lambda parameter: torch.device("cpu") if moving(parameter) else parameter.device)


def _move(optimizer: torch.optim.Optimizer, device_of: Callable[[Tensor], torch.device]) -> None:
    for group in optimizer.param_groups:
        counts_there = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            if parameter in optimizer.state:
                moved = partial(_moved, device_of(parameter), counts_there)
                optimizer.state[parameter] = _changed(optimizer.state[parameter], moved)


def _moved(device: torch.device, counts_there: bool, name: Any, state: Tensor) -> Tensor:
    return state if name == "step" and state.device.type == "cpu" and not counts_there else state.to(device)


def load_state(optimizer: torch.optim.Optimizer, loaded: Any) -> None:
    """Load a state dict. No state shares memory with ``loaded``, which a file may back."""
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        optimizer.state.clear()  # as of Adagrad, which makes its state at once; torch makes all of the new one first
    optimizer.load_state_dict(loaded)
    theirs = {_address(tensor) for tensor in nested_tensors(loaded)} - {0}

    def own(_: Any, state: Tensor) -> Tensor:
        return state.clone() if _address(state) in theirs else state

    for key, state in optimizer.state.items():
        optimizer.state[key] = _changed(state, own)


def _changed(value: Any, change: Change, name: Any = None) -> Any:
    """Change the tensors in ``value``. Dicts and lists stay the same objects."""
    if isinstance(value, Tensor):
        return change(name, value)
    if isinstance(value, dict):
        for key, part in value.items():
            value[key] = _changed(part, change, key)
    elif isinstance(value, list):
        value[:] = [_changed(part, change) for part in value]
    elif type(value) is tuple:
        return tuple(_changed(part, change) for part in value)
    return value


def _address(tensor: Tensor) -> int:
    return (address_of(tensor) or 0) if tensor.layout is torch.strided else 0
