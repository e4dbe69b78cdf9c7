"""A LightningModule that evaluates one of the tests' tasks, and its runs under the plain Trainer and ours."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_hetpipe import HetPipeStrategy
from tests.oracle import Batch, Outputs
from tests.support.ahead import Memory
from tests.support.models import Learner
from tests.support.trainers import quiet_trainer


class Evaluates(Learner):
    """Validates, tests and predicts with ``task``, and logs in every way there is."""

    def __init__(self, task: Learner) -> None:
        super().__init__(task.recipe)
        self.task = task
        self.mean = MeanMetric()
        self.seen: list[int] = []
        self.count = 0

    def compute(self, batch: Batch) -> Outputs:
        return self.task.compute(batch)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.count += 1
        assert not torch.is_grad_enabled()
        loss = self.compute(batch)["loss"]
        assert not loss.requires_grad
        self.seen.append(batch_idx)
        self.mean(loss)
        self.log("loss", loss, batch_size=len(batch[0]))
        self.log("each", loss, on_step=True, on_epoch=False)
        self.log("mean", self.mean)
        return loss

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch_idx, self.compute(batch)


class Outputs_(L.Callback):
    """Outputs of each step, in order."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int, Tensor]] = []

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.given.append((dataloader_idx, batch_idx, outputs.clone()))


def evaluated(module: L.LightningModule, loader: Any, strategy: Any, **settings: Any) -> list[Any]:
    """Everything that validate, test and predict show of ``module``."""
    outputs, memory = Outputs_(), Memory()
    trainer = quiet_trainer(strategy, callbacks=[outputs], logger=memory, **settings)
    validated = trainer.validate(module, loader, verbose=False)
    tested = trainer.test(module, loader, verbose=False)
    predicted = trainer.predict(module, loader)
    return [validated, tested, predicted, outputs.given, memory.logged, dict(trainer.callback_metrics)]


def pipeline(stages: int = 2, in_flight: int = 3, **settings: Any) -> HetPipeStrategy:
    return HetPipeStrategy(stages=stages, in_flight=in_flight, **settings)


class Model(L.LightningModule):
    """Four layers; a test writes its ``step``."""

    net: Any

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = net or nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh())

    def step(self, x: Tensor, batch_idx: int) -> Any:
        return self.net(x)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch[0], batch_idx)

    test_step = validation_step
    predict_step = validation_step
