"""Weights that go on to another device in the first forward, where their own would be full of activations by then.

A model is spread by the bytes of its weights, and what its activations take is seen only when it runs: those of a
ResNet lie nearly all on the device of its first layers, which hold few of its weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.placement.measuring import known_optimizer
from lightning_hetpipe.placement.optimizer_states import follow_parameters
from lightning_hetpipe.placement.spread import move_live
from lightning_hetpipe.planning.model.stage_memory import optimizer_state
from lightning_hetpipe.planning.search.spread_plan import FULL


class Overflow:
    """Told of the operands of each operation; moves weights and buffers of ``module`` before their first use.

    Args:
        module: The whole model, spread over ``devices``.
        devices: In the order of the layers.
        limits: Bytes of those of the devices that have a limit.
        optimizers: Whose states go with the weights, in a run that is resumed.
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
        # What comes for each byte of a trained weight: its gradient, and the optimizer's state.
        states = [optimizer_state(known_optimizer(each)) for each in optimizers if not each.state]
        self._later = 1 + max(states, default=0)
        self._owed = Counter[torch.device]()

    def __call__(self, operands: Sequence[Tensor]) -> None:
        """An operation is about to be run on ``operands``."""
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
        """Bytes that ``device`` would have left with the ``new`` weights and what is ``owed`` to them."""
        if device not in self._limits:
            return math.inf
        coming = owed + sum(each.nbytes for each in new if each.device != device)
        taken = torch.accelerator.memory_allocated(device) + self._owed[device]
        return FULL * self._limits[device] - taken - coming
