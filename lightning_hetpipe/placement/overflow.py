"""Weights that go on to another device in the first forward, where their own would be full of activations by then.

A model is spread by the bytes of its weights, and what its activations take is seen only when it runs: those of a
ResNet lie nearly all on the device of its first layers, which hold few of its weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_hetpipe.placement.optimizer_states import follow_parameters
from lightning_hetpipe.placement.spread import move_live

FULL = 0.7
"""Part of a device's bytes from which on it takes no more weights: what they make of their inputs comes on top."""

OWED = 3
"""Bytes that come for each byte of a trained weight: its gradient, and two of an optimizer's state, as Adam has."""


class Overflow:
    """Told of the operands of each operation; moves weights and buffers of ``module`` before their first use.

    Args:
        module: The whole model, spread over ``devices``.
        devices: In the order of the layers.
        limits: Bytes of those of the devices that have a limit.
        optimizers: Whose states go with the weights, in a run that is resumed.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        limits: Mapping[torch.device, int],
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self._unused = {id(tensor) for tensor in (*module.parameters(), *module.buffers())} if limits else set()
        self._devices = list(dict.fromkeys(devices))
        self._limits = limits
        self._optimizers = optimizers
        self._owed = Counter[torch.device]()

    def __call__(self, operands: Sequence[Tensor]) -> None:
        """An operation is about to be run on ``operands``."""
        if not self._unused or not (new := [each for each in operands if id(each) in self._unused]):
            return
        self._unused.difference_update(map(id, new))
        owed = sum(OWED * each.nbytes for each in new if each.requires_grad) if torch.is_grad_enabled() else 0
        later = self._devices[self._devices.index(new[0].device) :]
        device = next((each for each in later if not self._is_full(each, new, owed)), new[0].device)
        self._owed[device] += owed
        if any(each.device != device for each in new):
            for each in new:
                move_live(each, device)
            for optimizer in self._optimizers:
                if optimizer.state:
                    follow_parameters(optimizer)

    def _is_full(self, device: torch.device, new: Sequence[Tensor], owed: int) -> bool:
        if device not in self._limits:
            return False
        coming = owed + sum(each.nbytes for each in new if each.device != device)
        taken = torch.accelerator.memory_allocated(device) + self._owed[device]
        return taken + coming > FULL * self._limits[device]
