"""Spreading a model over devices before its layers are known, and moving its tensors and their optimizer state.

The model is divided by the bytes of its parameters and the devices' memory. In training, frozen parameters count less,
because they have no gradient and no optimizer state. Modules with tensors are divided in the order of their
registration, which is mostly the order of their calls. Modules without tensors, such as metrics with their states, lie
on the root device.

The memory of activations is seen only when the model runs. Activations of a ResNet lie nearly all on the device of its
first layers, which hold few weights. So in the first forward, weights move on if activations have filled their device.

The state of an optimizer lies where its parameters lie, and moves there one tensor at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.pipeline.values import nested_tensors
from lightning_hetpipe.placement.measuring import known_optimizer
from lightning_hetpipe.planning.model.stage_memory import optimizer_state
from lightning_hetpipe.planning.search.split_points import FROZEN, FULL, divided
from lightning_hetpipe.torch_private.modules import without_tensors
from lightning_hetpipe.torch_private.tensors import address_of


def spread(
    module: nn.Module, devices: Sequence[torch.device], room: Sequence[float], *, frozen: float = FROZEN
) -> None:
    """Move ``module`` to ``devices``, each part of it with tensors of its own to one device.

    Args:
        devices: Device of each stage, in order. The last device is the root device.
        room: Room of each stage, in any unit. Tensors are divided in about these proportions.
        frozen: Weight of a frozen parameter's bytes.
    """
    parts = list(_with_tensors(module))
    sizes = [
        sum(each.nbytes * (frozen if isinstance(each, nn.Parameter) and not each.requires_grad else 1) for each in own)
        for _, own in parts
    ]
    stages = divided(sizes, room)
    pairs = zip(parts, stages, strict=True)
    move_apart(module, {id(each): devices[stage] for (_, tensors), stage in pairs for each in tensors}, devices[-1])


def move_apart(module: nn.Module, places: Mapping[int, torch.device], root: torch.device) -> None:
    """Move each tensor of ``module`` to its device in ``places``, by its ``id``, and all other tensors to ``root``.

    Tensors leave a device before other tensors come, so no device ever holds more than before or after.
    """
    if all(device == root for device in places.values()):
        module.to(root)
        return
    parts = list(_with_tensors(module))
    with without_tensors([part for part, _ in parts]):
        module.to(root)  # which also tells a LightningModule and its metrics
    for target in (torch.device("cpu"), None):
        for _, tensors in parts:
            for tensor in tensors:
                device = places.get(id(tensor), root)
                if tensor.device != device:
                    move_live(tensor, target or device)


def move_live(tensor: Tensor, device: torch.device) -> None:
    """Move ``tensor``, a parameter or buffer of the user's, to ``device`` as the same object, with its gradient."""
    if tensor.device == device:
        return
    gradient, tensor.grad = tensor.grad, None
    # In an evaluation the copy would be an inference tensor, on which no graph can be built.
    with torch.inference_mode(tensor.is_inference()):
        tensor.data = tensor.data.to(device)
    if gradient is not None:
        tensor.grad = gradient.to(device)


def _with_tensors(module: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Yield parts of ``module`` with parameters and buffers of their own. A tied tensor belongs to its first owner."""
    seen: set[int] = set()
    for part in module.modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        new = [tensor for tensor in own if id(tensor) not in seen]
        seen.update(map(id, new))
        if own:
            yield part, new


class Overflow:
    """Observer of the operands of each operation, which moves weights and buffers of ``module`` before their first use.

    Args:
        devices: Devices over which the model is spread, in the order of the layers.
        limits: Bytes of each device that has a limit.
        optimizers: Optimizers whose states move with the weights, in a run that is resumed.
        finetuned: Whether weights that are frozen now are trained later.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        limits: Mapping[torch.device, int],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        finetuned: bool = False,
    ) -> None:
        self._unused = {id(tensor) for tensor in (*module.parameters(), *module.buffers())} if limits else set()
        self._devices = list(dict.fromkeys(devices))
        self._limits = {device: limit for device, limit in limits.items() if accelerates(device)}
        self._optimizers = optimizers
        self._finetuned = finetuned
        # Bytes that follow for each byte of a trained weight: its gradient, and the optimizer's state.
        states = [optimizer_state(known_optimizer(each)) for each in optimizers if not each.state]
        self._later = 1 + max(states, default=0)
        self._owed = Counter[torch.device]()

    def __call__(self, operands: Sequence[Tensor]) -> None:
        """Make room before an operation runs on ``operands``."""
        if not self._unused or not (new := [each for each in operands if id(each) in self._unused]):
            return
        self._unused.difference_update(map(id, new))
        trained = sum(each.nbytes for each in new if self._is_trained(each))
        owed = int(self._later * trained)
        later = self._devices[self._devices.index(new[0].device) :]
        left = {each: self._room(each, new, owed) for each in self._devices}
        device = next((each for each in later if left[each] >= 0), None) or max(self._devices, key=left.__getitem__)
        self._owed[device] += owed
        if any(each.device != device for each in new):
            for each in new:
                move_live(each, device)
            for optimizer in self._optimizers:
                if optimizer.state:
                    follow_parameters(optimizer)

    def _is_trained(self, tensor: Tensor) -> bool:
        if self._finetuned:
            return isinstance(tensor, nn.Parameter)
        return tensor.requires_grad and torch.is_grad_enabled()

    def _room(self, device: torch.device, new: Sequence[Tensor], owed: int) -> float:
        """Return the bytes that ``device`` would have left with the ``new`` weights and the bytes they still need."""
        if device not in self._limits:
            return math.inf
        coming = owed + sum(each.nbytes for each in new if each.device != device)
        taken = torch.accelerator.memory_allocated(device) + self._owed[device]
        return FULL * self._limits[device] - taken - coming


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


def _changed(value: Any, change: Callable[[Any, Tensor], Tensor], name: Any = None) -> Any:
    """Change the tensors in ``value``, each by its name, if it has one. Dicts and lists stay the same objects."""
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
