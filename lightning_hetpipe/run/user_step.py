"""``training_step`` as the pipeline's runners call it: its loss on the minibatch's scale."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_hetpipe.lightning_private import closure_loss
from lightning_hetpipe.run.extensions.minibatch_state import LossScale
from lightning_hetpipe.run.run_settings import checked_loss


@dataclass(frozen=True)
class UserStep:
    """``training_step`` of the Trainer's module, under its ``precision``, with losses on ``loss_scale``."""

    trainer: L.Trainer
    precision: Precision
    loss_scale: LossScale

    def run(self, number: int, args: tuple[Any, ...]) -> tuple[Any, Tensor]:
        """Run minibatch ``number``; return what the step returns, and the loss to start its backward from."""
        with self.precision.train_step_context():
            output = self.trainer.lightning_module.training_step(*args)
        return output, self.loss_scale.scaled(number, self.loss_of(output))

    def loss_of(self, output: Any) -> Tensor:
        """The loss in what the step returned; raises SettingError unless a backward pass can start from it."""
        return checked_loss(closure_loss(output, self.trainer.accumulate_grad_batches))

    def default_dtype(self) -> torch.dtype | None:
        """The default dtype within ``training_step``, where the precision plugin makes it another one."""
        return default_dtype_in(self.precision.train_step_context)


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
