"""``training_step`` as the pipeline's runners call it: its loss on the minibatch's scale."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_hetpipe.lightning_private import closure_loss
from lightning_hetpipe.run.extensions.minibatch_state import LossScale
from lightning_hetpipe.run.run_settings import checked_loss


class UserStep:
    """``training_step`` of the Trainer's module, under its ``precision``, with losses on ``loss_scale``."""

    def __init__(self, trainer: L.Trainer, precision: Precision, loss_scale: LossScale) -> None:
        self._trainer = trainer
        self._module: L.LightningModule = trainer.lightning_module
        self._precision = precision
        self._loss_scale = loss_scale

    def run(self, number: int, args: tuple[Any, ...]) -> tuple[Any, Tensor]:
        """Run minibatch ``number``; return what the step returns, and the loss to start its backward from."""
        with self._precision.train_step_context():
            output = self._module.training_step(*args)
        return output, self._loss_scale.scaled(number, self.loss_of(output))

    def loss_of(self, output: Any) -> Tensor:
        """The loss in what the step returned, which is checked."""
        return checked_loss(closure_loss(output, self._trainer.accumulate_grad_batches))

    def default_dtype(self) -> torch.dtype | None:
        """The default dtype within ``training_step``, where the precision plugin makes it another one."""
        return default_dtype_in(self._precision.train_step_context)


def default_dtype_in(context: Callable[[], AbstractContextManager[Any]]) -> torch.dtype | None:
    """The default dtype within ``context``; None where that is the process's."""
    with context():
        inside = torch.get_default_dtype()
    return None if inside is torch.get_default_dtype() else inside


def without_graph(output: Any) -> Any:
    """``output`` of ``training_step`` with its loss detached: the gradients exist already."""
    if isinstance(output, Tensor):
        return output.detach()
    return {**output, "loss": output["loss"].detach()}
