"""The loss scale of half precision, of which each minibatch in flight has its own (law L1)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor

from lightning_hetpipe.run.lifecycle import Extension


class LossScale(Extension):
    """The scale of ``precision``'s GradScaler, at which losses are differentiated and gradients delivered.

    A GradScaler changes its scale after steps, so it belongs to a version as weights do: minibatch p takes it when it
    is submitted, which is at its version, and not when its loss happens to be there. Its gradients are then those of
    an older scale than the one by which the optimizer's step divides; :meth:`factor` makes up for that. Gradients that
    are not finite stay so, and the step is skipped.

    Args:
        precision: Without a scaler, all scales are 1.
        waiting: Opened while the scale comes from its device.
    """

    def __init__(self, precision: Precision, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        scaler = precision.scaler if isinstance(precision, MixedPrecision) else None
        self._scaler: Any = scaler or torch.amp.GradScaler("cpu", enabled=False)
        self._waiting = waiting
        self._of: dict[int, float] = {}

    def submitting(self, minibatch: int) -> None:
        """The scale of ``minibatch`` is the present one."""
        self._of[minibatch] = self._present()

    def scaled(self, minibatch: int, loss: Tensor) -> Tensor:
        """``loss`` of ``minibatch``, times its scale."""
        if not self._scaler.is_enabled():
            return loss
        # A tensor as the scaler's own is: a number would leave a loss in half precision there, and that overflows.
        return loss * torch.full((), self._of[minibatch], dtype=torch.float32, device=loss.device)

    def factor(self, minibatch: int) -> float:
        """Factor that makes the gradients of ``minibatch`` those of the present scale."""
        return self._present() / self._of.pop(minibatch)

    def discarded(self) -> None:
        """Forgets what was in flight."""
        self._of.clear()

    def _present(self) -> float:
        if not self._scaler.is_enabled():
            return 1.0
        with self._waiting():
            return float(self._scaler.get_scale())
