"""The oracle as a strategy: Lightning's plain loop, in one thread, with the pipeline's staleness and nothing else.

Minibatch p computes its loss and its gradient on version max(v_e, p - Nm) of the weights, where v_e is the version at
which a pipeline would have started empty. All else is the plain single-device strategy's, so hooks, checkpoints, logs
and callbacks of a run are those that a pipeline with Nm minibatches in flight must reproduce. (Models in it draw no
random numbers: a pipeline's have generators of their own.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor


class Stale(SingleDeviceStrategy):
    """Trains with ``in_flight`` minibatches in flight, but for the flight."""

    def __init__(self, in_flight: int) -> None:
        super().__init__("cpu")
        self.in_flight = in_flight
        self._versions: dict[int, dict[str, Tensor]] = {}
        self._empty_at = 0
        self._epoch: int | None = None

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        self._trainer, self._epoch = trainer, None
        self._versions = {}

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        trainer = self._trainer
        if trainer.training and not trainer.sanity_checking:
            self._publish(trainer.fit_loop.epoch_loop.batch_progress.total.ready, trainer.current_epoch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def _publish(self, version: int, epoch: int) -> None:
        """Lightning has asked for the next batch: the step before it is over, with all its callbacks."""
        assert self.lightning_module is not None
        if epoch != self._epoch:
            self._epoch, self._empty_at = epoch, version
        weights = self.lightning_module.named_parameters()
        self._versions[version] = {name: weight.detach().clone() for name, weight in weights}

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._version():
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        plugin, module = self.precision_plugin, self.lightning_module
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        with self._version():
            plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def _version(self) -> Iterator[None]:
        assert self.lightning_module is not None
        minibatch = self._trainer.fit_loop.epoch_loop.batch_progress.total.ready
        version = self._versions[max(self._empty_at, minibatch - self.in_flight)]
        weights = dict(self.lightning_module.named_parameters())
        live = {name: weight.data for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.data = version.get(name, weight.data)
        try:
            yield
        finally:
            for name, weight in weights.items():
                # What the step left in place of a version is not the live weights.
                assert name not in version or torch.equal(weight.data, version[name])
                weight.data = live[name]
