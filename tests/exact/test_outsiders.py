"""Callbacks, loggers and metrics see step p at step p, though later minibatches are in flight (law L9)."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests import oracle
from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.oracle import Batch, Outputs, Recipe, Run, State
from tests.support.equality import assert_same, difference
from tests.support.marks import slow_except
from tests.support.models import ADAMW, CLASSES, SGD, Task, convnet, decay, images, mlp, sgd, vectors

NM = slow_except([1, 4], 4)


class Witness(L.Callback):
    """Compares each hook's view with the oracle's versions."""

    def __init__(self, expected: Run) -> None:
        self.expected = expected
        self.p = 0
        self.found: list[str] = []

    def compare(self, hook: str, expected: Any, actual: Any) -> None:
        if found := difference(expected, actual, f"{hook}({self.p})"):
            self.found.append(found)

    def sees(self, hook: str, version: int, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.compare(hook, self.expected.states[version], State.of(pl_module, trainer.optimizers[0]))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.sees("on_train_epoch_start", self.p, trainer, pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.sees("on_train_batch_start", self.p, trainer, pl_module)
        self.p += 1
        if trainer.global_step != self.p - 1 or trainer.fit_loop.total_batch_idx != self.p - 1:
            self.found.append(f"on_train_batch_start({self.p}): {trainer.global_step} steps")

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        before, after = self.expected.states[self.p - 1 : self.p + 1]
        now = State.of(pl_module, optimizer)
        self.compare("on_before_optimizer_step", before.weights, now.weights)
        self.compare("on_before_optimizer_step", before.optimizer["state"], now.optimizer["state"])
        # As in a plain run, the forward pass has left its statistics.
        self.compare("on_before_optimizer_step", after.buffers, now.buffers)
        self.compare("on_before_optimizer_step", self.expected.gradients[self.p], oracle.gradients(pl_module))

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self.compare(
            "on_before_zero_grad", self.expected.states[self.p - 1].weights, State.of(pl_module, optimizer).weights
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.sees("on_train_batch_end", self.p, trainer, pl_module)
        self.compare("loss", self.expected.losses[self.p - 1], trainer.callback_metrics["loss"])
        if trainer.global_step != self.p:
            self.found.append(f"on_train_batch_end({self.p}): {trainer.global_step} steps")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.sees("on_train_epoch_end", self.p, trainer, pl_module)


@pytest.mark.parametrize("in_flight", NM)
def test_hooks_see_their_own_step(in_flight: int) -> None:
    task, loader = convnet(ADAMW), images(18, 4)
    expected = expect(task, loader, in_flight)
    witness = Witness(expected)
    fit(task, loader, [witness], strategy=even(9, 3, in_flight))
    assert witness.p == 10
    assert not witness.found, "\n".join(witness.found[:5])


class Memory(Logger):
    """A logger that remembers."""

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    name = "memory"
    version = "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def of(self, name: str) -> list[tuple[int | None, float]]:
        return [(step, metrics[name]) for step, metrics in self.rows if name in metrics]


@pytest.mark.parametrize("in_flight", NM)
def test_logged_losses_are_the_oracles(in_flight: int) -> None:
    task, loader = mlp(Recipe(sgd, decay)), vectors(18, 4)
    expected = expect(task, loader, in_flight)
    logger = Memory()
    rates = L.pytorch.callbacks.LearningRateMonitor()
    settings: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1}
    fit(task, loader, [rates], strategy=even(7, 3, in_flight), **settings)
    assert logger.of("loss_step") == list(enumerate(loss.item() for loss in expected.losses))
    used = [state.optimizer["param_groups"][0]["lr"] for state in expected.states[:-1]]
    assert logger.of("lr-SGD") == list(enumerate(used))
    sizes = [len(y) for _, y in loader]
    for epoch, (_, mean) in enumerate(logger.of("loss_epoch")):
        losses = expected.losses[epoch * len(sizes) : (epoch + 1) * len(sizes)]
        by_hand = MeanMetric()
        for loss, size in zip(losses, sizes, strict=True):
            by_hand.update(loss, size)
        assert mean == by_hand.compute().item()


class Measured(Task):
    """Metrics in the step: one that ``self.log`` computes, one that it is only told to update."""

    def __init__(self) -> None:
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))
        super().__init__(net, SGD)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.mean = MeanMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
        outputs = self.compute(batch)
        self.accuracy(outputs["logits"], batch[1])
        self.mean.update(outputs["loss"])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return outputs


class Metrics(L.Callback):
    """Follows the metrics from outside, and keeps their values."""

    def __init__(self, expected: Run, labels: list[Tensor]) -> None:
        self.expected, self.labels = expected, labels
        self.p = 0
        self.epochs: list[tuple[Tensor, Tensor]] = []
        self.accuracy, self.mean = MulticlassAccuracy(CLASSES, average="micro"), MeanMetric()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.accuracy.reset()
        self.mean.reset()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = self.accuracy(self.expected.outputs[self.p]["logits"], self.labels[self.p])
        self.mean.update(self.expected.losses[self.p])
        self.p += 1
        assert isinstance(pl_module, Measured)
        assert torch.equal(trainer.callback_metrics["accuracy_step"], step), f"accuracy of step {self.p}"
        for mine, its in ((self.accuracy, pl_module.accuracy), (self.mean, pl_module.mean)):
            assert_same(mine.metric_state, its.metric_state, f"{type(mine).__name__} at {self.p}")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = trainer.callback_metrics
        assert torch.equal(metrics["accuracy_epoch"], self.accuracy.compute())
        assert torch.equal(metrics["mean"], self.mean.compute())
        self.epochs.append((metrics["accuracy_epoch"], metrics["mean"]))


@pytest.mark.parametrize("in_flight", NM)
def test_metrics_are_those_of_the_step(in_flight: int) -> None:
    task, loader = Measured(), vectors(18, 4)
    expected = expect(task, loader, in_flight)
    follower = Metrics(expected, [y for _, y in loader] * 2)
    # The recorder comes after the follower: its check of all states is made here, too.
    assert_equal(expected, fit(task, loader, [follower], strategy=even(4, 2, in_flight)))
    assert len(follower.epochs) == 2


class Shrink(L.Callback):
    """Edits weights after every third minibatch, as pruning or a weight constraint would."""

    def __init__(self, through_data: bool) -> None:
        self.p = 0
        self.through_data = through_data

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.p += 1
        shrink(self.p, pl_module, self.through_data)


def shrink(p: int, model: nn.Module, through_data: bool = False) -> None:
    if p % 3 == 0:
        weight = model.get_parameter("net.0.weight")
        if through_data:
            weight.data.mul_(0.5)
        else:
            with torch.no_grad():
                weight.mul_(0.5)


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("in_flight", NM)
def test_weights_that_a_callback_edits(in_flight: int, through_data: bool) -> None:
    task, loader = mlp(), vectors(18, 4)
    expected = expect(task, loader, in_flight, edit=shrink)
    assert_equal(expected, fit(task, loader, [Shrink(through_data)], strategy=even(7, 3, in_flight)))


class Reset(L.Callback):
    """Replaces a weight's tensor between epochs."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        reset(trainer.current_epoch, pl_module)


def reset(epoch: int, model: nn.Module) -> None:
    weight = model.get_parameter("net.2.weight")
    weight.data = torch.eye(16) / (epoch + 1)


@pytest.mark.parametrize("in_flight", NM)
def test_weights_that_are_replaced_between_epochs(in_flight: int) -> None:
    task, loader = mlp(), vectors(18, 4)
    first = mlp()
    first.load_state_dict(task.state_dict())
    reset(0, first)
    expected = expect(first, loader, in_flight, edit=lambda p, model: reset(1, model) if p == 5 else None)
    record = fit(task, loader, [Reset()], strategy=even(7, 3, in_flight))
    assert_same(expected.outputs, record.outputs, "outputs")
    assert_same(expected.states[-1], record.end, "end")


def test_optimizer_state_stays_beside_its_parameter() -> None:
    task, loader = mlp(ADAMW), vectors(18, 4)
    record = fit(task, loader, strategy=even(7, 3, 3))
    assert record.trainer is not None
    state = record.trainer.optimizers[0].state
    assert set(state) == set(task.parameters())
    for parameter, entries in state.items():
        assert entries["exp_avg"].device == parameter.device
        assert entries["exp_avg"].shape == parameter.shape
        assert entries["step"].item() == 10
