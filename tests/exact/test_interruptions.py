"""Stops and evaluations in the middle, and runs one after another: exact at p, and no trace of look-ahead (law L9)."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torchmetrics import MeanMetric

from tests.exact.pipelines import even
from tests.exact.running import Recorder, assert_equal, expect, finish, fit
from tests.oracle import Batch, Outputs, Run, State
from tests.support.equality import assert_same
from tests.support.marks import quick, slow_except
from tests.support.models import ADAMW, CLASSES, SGD, Task, convnet, images, mlp, resnet, vectors
from tests.support.trainers import quiet_trainer

NM = slow_except([1, 4], 4)
LENGTH = 5  # batches of an epoch of 18 samples in fours


@pytest.mark.parametrize("in_flight", NM)
@pytest.mark.parametrize("steps", [1, 3, 5, 7])
def test_max_steps(steps: int, in_flight: int) -> None:
    task, loader = convnet(ADAMW), images(18, 4)
    expected = expect(task, loader, in_flight, stop_after=steps)
    record = fit(task, loader, strategy=even(9, 3, in_flight), max_steps=steps, max_epochs=-1)
    assert_equal(expected, record)
    assert record.trainer is not None
    assert record.trainer.global_step == steps


@pytest.mark.parametrize("accumulate", [1, 2])
def test_nothing_runs_past_max_steps(accumulate: int) -> None:
    """Neither a batch is read nor a step run that Lightning will not ask for."""

    steps: list[int] = []

    class Counts(Task):
        def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
            steps.append(batch_idx)  # an attribute of the module would not show what is discarded
            return super().training_step(batch, batch_idx)

    task = mlp(task=Counts)
    settings: dict[str, Any] = {"max_steps": 3, "max_epochs": -1, "accumulate_grad_batches": accumulate}
    fit(task, vectors(40, 4), strategy=even(7, 2, 5), **settings)
    assert steps == [*range(3 * accumulate)]


class Stop(L.Callback):
    def __init__(self, p: int, error: bool = False) -> None:
        self.p = p
        self.error = error

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.p -= 1
        if self.p == 0:
            if self.error:
                raise ArithmeticError("stop here")
            trainer.should_stop = True


@pytest.mark.parametrize("in_flight", NM)
@pytest.mark.parametrize("p", [2, 5, 8])
def test_should_stop(p: int, in_flight: int) -> None:
    task, loader = convnet(ADAMW), images(18, 4)
    expected = expect(task, loader, in_flight, stop_after=p)
    assert_equal(expected, fit(task, loader, [Stop(p)], strategy=even(9, 3, in_flight)))


@pytest.mark.parametrize("in_flight", NM)
def test_an_exception_leaves_the_last_finished_step(in_flight: int) -> None:
    task, loader = convnet(ADAMW), images(18, 4)
    expected = expect(task, loader, in_flight, stop_after=4)
    keeper = Keeper()
    with pytest.raises(ArithmeticError, match="stop here"):
        fit(task, loader, [keeper, Stop(4, error=True)], strategy=even(9, 3, in_flight))
    assert keeper.optimizer is not None
    assert_same(expected.states[4], State.of(task, keeper.optimizer), "left")


class Keeper(L.Callback):
    """Keeps the optimizer, which a Trainer that failed forgets."""

    optimizer: torch.optim.Optimizer | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.optimizer = trainer.optimizers[0]


@pytest.mark.parametrize("in_flight", NM)
def test_the_rest_of_an_epoch_is_skipped(in_flight: int) -> None:
    class Skipping(Task):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 and batch_idx == 3 else None

    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    task, loader = Skipping(net, ADAMW), vectors(18, 4)
    expected = expect(task, [list(loader)[:3], list(loader)], in_flight)
    assert_equal(expected, fit(task, loader, strategy=even(4, 2, in_flight)))


class Validations(L.Callback):
    """Keeps each validation's loss, by the number of minibatches that were done."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.losses.append((trainer.fit_loop.total_batch_idx + 1, trainer.callback_metrics["val_loss"].item()))


def evaluated(task: Task, expected: Run, p: int, loader: Any) -> float:
    """The loss of version ``p`` over a loader, as Lightning averages it."""
    model = type(task)(resnet().net, SGD)
    model.load_state_dict({**expected.states[p].weights, **expected.states[p].buffers})
    model.eval()
    mean = MeanMetric()
    with torch.no_grad():
        for batch in loader:
            mean.update(model.compute(batch)["loss"], len(batch[0]))
    return mean.compute().item()


@pytest.mark.parametrize("in_flight", NM)
@pytest.mark.parametrize(("interval", "accumulate"), slow_except([(2, 1), (2, 3), (1.0, 1), (1.0, 3)], (2, 3)))
def test_validation_leaves_training_as_it_was(interval: float, accumulate: int, in_flight: int) -> None:
    """It evaluates version p, holds what is in flight, and training is that of a run without validation."""
    task, loader, val_loader = resnet(ADAMW), images(18, 4), images(10, 4, seed=9)
    expected = expect(task, loader, in_flight, accumulate=accumulate)
    validations = Validations()
    settings: dict[str, Any] = {"val_check_interval": interval, "accumulate_grad_batches": accumulate}
    record = fit(
        task,
        loader,
        [validations],
        val_loader=val_loader,
        strategy=even(9, 3, in_flight),
        num_sanity_val_steps=2,
        **settings,
    )
    assert_equal(expected, record)
    versions = [2, 4, 7, 9] if interval == 2 else [5, 10]
    assert validations.losses == [(p, evaluated(task, expected, p, val_loader)) for p in versions]


@pytest.mark.parametrize("in_flight", NM)
def test_early_stopping(in_flight: int) -> None:
    task, loader = mlp(ADAMW), vectors(18, 4)
    expected = expect(task, loader, in_flight, max_epochs=6)
    # The third validation is the first one below the threshold.
    val_loader = vectors(18, 4)
    losses = [evaluated_mlp(expected, epoch * LENGTH, val_loader) for epoch in range(1, 7)]
    assert losses[1] > losses[2]
    stopping = EarlyStopping("val_loss", stopping_threshold=(losses[1] + losses[2]) / 2, patience=10)
    record = fit(task, loader, [stopping], val_loader=val_loader, strategy=even(7, 3, in_flight), max_epochs=6)
    assert_equal(until(expected, 3 * LENGTH), record)


def evaluated_mlp(expected: Run, p: int, loader: Any) -> float:
    model = mlp()
    model.load_state_dict(expected.states[p].weights)
    losses = [model.compute(batch)["loss"] * len(batch[0]) for batch in loader]
    return torch.stack(losses).sum().item() / 18


def until(run: Run, p: int) -> Run:
    kept = {minibatch: gradients for minibatch, gradients in run.gradients.items() if minibatch <= p}
    return Run(run.outputs[:p], run.states[: p + 1], kept)


def test_evaluation_after_training() -> None:
    task, loader = resnet(ADAMW), images(20, 4)
    expected = expect(task, loader, 4)
    recorder = Recorder()
    trainer = quiet_trainer(even(9, 3, 4), callbacks=[recorder], max_epochs=2)
    trainer.fit(task, loader)
    assert_equal(expected, finish(recorder, trainer, task))
    value = evaluated(task, expected, 10, loader)
    assert trainer.validate(task, loader, verbose=False) == [{"val_loss": value}]
    assert trainer.test(task, loader, verbose=False) == [{"test_loss": value}]
    predicted = trainer.predict(task, loader)
    assert predicted is not None
    task.eval()
    with torch.no_grad():
        assert_same([task(x) for x, _ in loader], predicted, "predictions")
    assert_same(expected.states[-1], finish(recorder, trainer, task).end, "end")


@quick("True")
@pytest.mark.parametrize("same_trainer", [True, False])
def test_a_second_fit(same_trainer: bool) -> None:
    """It starts with fresh optimizers from the weights that the first one left, as Lightning does."""
    task, loader = convnet(ADAMW), images(18, 4)
    expected = expect(task, loader, 4)
    recorder = Recorder()
    trainer = quiet_trainer(even(9, 3, 4), callbacks=[recorder], max_epochs=2)
    trainer.fit(task, loader)
    assert_equal(expected, finish(recorder, trainer, task))

    recorder.__init__()  # type: ignore[misc]  # a new record
    expected = expect(task, loader, 4, max_epochs=1)
    if same_trainer:
        assert trainer.fit_loop.max_epochs == 2
        trainer.fit_loop.max_epochs = 3
    else:
        trainer = quiet_trainer(even(9, 2, 4), callbacks=[recorder])
    trainer.fit(task, loader)
    assert_equal(expected, finish(recorder, trainer, task))
