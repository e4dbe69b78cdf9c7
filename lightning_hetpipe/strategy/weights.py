"""A strategy whose weights are made and loaded on the host, from where layers and states go to their devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_hetpipe.lightning_private import set_checkpoint_io
from lightning_hetpipe.placement.optimizer_states import load_state
from lightning_hetpipe.strategy import meta_weights, relations
from lightning_hetpipe.strategy.checkpoints import ReplacingCheckpointIO, filled
from lightning_hetpipe.strategy.meta_weights import uninitialised_on_meta


class HostWeights(ParallelStrategy):
    """Lightning's strategies make modules, and gather states of optimizers, on one device; none may hold so much here.

    Args:
        checkpoint_io: As ``ParallelStrategy``'s.
        arguments: ``ParallelStrategy``'s.
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None, **arguments: Any) -> None:
        super().__init__(checkpoint_io=filled(checkpoint_io), **arguments)
        self.run_seed = 0
        """Seed of the run's random numbers, the same on all virtual workers."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writer of checkpoints; where Lightning would take its own, one that keeps the old file until it is done."""
        if type(super().checkpoint_io) is TorchCheckpointIO:  # nobody has chosen it
            self.checkpoint_io = ReplacingCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        set_checkpoint_io(self, filled(io))

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make tensors on the host, with ``empty_init`` those that are not initialised on meta."""
        emptily = uninitialised_on_meta() if empty_init else nullcontext()
        with torch.device("cpu"), emptily, self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: L.Trainer) -> None:
        """Do as Lightning's, which would move all states of optimizers to one device; first give weights values."""
        assert self.accelerator is not None
        assert self.model is not None
        self.run_seed = self._agreed(relations.run_seed())
        meta_weights.fill(trainer.lightning_module, self.run_seed)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _agreed(self, value: int) -> int:
        return value

    def teardown(self) -> None:
        with meta_weights.left_on_meta(self.lightning_module):  # by a run that ends before it has begun
            super().teardown()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        meta_weights.load(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # As Lightning does, what has no counterpart is left out.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_state(optimizer, state)
